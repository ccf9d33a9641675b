"""Loads the denoisers of a pipeline alone, as the pipeline loader loads them with it.

Does not know what they are for, and leaves them where diffusers puts them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from configs.stages import EngineArgs
from workers.devices.quantization import quantized_arguments
from workers.devices.weight_dtype import weight_dtype


def load_denoisers(
    args: EngineArgs, described: Mapping[str, tuple[str, torch.dtype]], device: str
) -> dict[str, Any]:
    """Return those parts of the pipeline, by their names, in evaluation mode.

    `described` has the class of diffusers of each and its dtype; `device` is `cpu` or `cuda`.

    Raises:
        ModelLoadFailed: They can not be quantized as the stage asks for; so do the errors of
            diffusers for weights that can not be read.
    """
    untyped: Any = diffusers
    given = quantized_arguments(args, weight_dtype(args, device), device)
    config = given.get("quantization_config")
    configs = {} if config is None else config.quant_mapping
    found: dict[str, Any] = {}
    for name, (class_name, dtype) in described.items():
        if name in given:  # read from a file of its own
            found[name] = given[name].eval()
            continue
        found[name] = getattr(untyped, class_name).from_pretrained(
            args.model,
            subfolder=name,
            dtype=dtype,
            variant=args.variant,
            revision=args.revision,
            local_files_only=Path(args.model).is_dir(),
            quantization_config=configs.get(name),
        )
        found[name].eval()
    return found
