"""Where the LoRA adapters of a stage are: those it names, and the files of its folder of them.

Reads names only; whether a file can be read and fits the model shows when it is loaded.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from configs.errors import ModelLoadFailed
from configs.pipeline_fields import LORA_NAME
from configs.pipeline_settings import LoraSource, PipelineSettings

_logger = logging.getLogger(__name__)

_ENDING = ".safetensors"
# The file that diffusers writes into a folder of its own for each adapter.
_USUAL_FILE = "pytorch_lora_weights.safetensors"


def adapter_sources(settings: PipelineSettings) -> Mapping[str, LoraSource]:
    """Return the adapters by name: those of `lora_modules`, and the files of `lora_dir`.

    Raises:
        ModelLoadFailed: A name stands for two adapters.
    """
    found = dict(settings.lora_modules)
    for path in sorted(Path(settings.lora_dir).iterdir()) if settings.lora_dir else ():
        name = path.name.removesuffix(_ENDING)
        if path.is_dir() and (path / _USUAL_FILE).is_file():
            source = LoraSource(str(path), _USUAL_FILE)
        elif path.suffix == _ENDING and path.is_file():
            source = LoraSource(str(path.parent), path.name)
        else:
            continue
        if not LORA_NAME.match(name):
            _logger.warning("%s is left out: %r is no name for an adapter", path, name)
            continue
        if name in found:
            raise ModelLoadFailed(
                f"engine_args.lora_dir: {name!r} is there twice, as {found[name].path} and as "
                f"{path}; rename one"
            )
        found[name] = source
    return found
