"""LoRA adapters of one pipeline: loaded when a request names them, set when its calls run.

PEFT keeps which adapters are active, and their scales, inside the shared modules. So nothing is set
for each request's thread: text encoders are set while the request has the turn to encode, denoisers
by the rendezvous (`set_denoisers` is its switch) before the forwards of a set. Loading and removing
change the modules and happen while both are kept still. Knows diffusers' LoRA loaders, no family.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import (
    disable_lora_for_text_encoder,
    enable_lora_for_text_encoder,
    set_adapters_for_text_encoder,
)

from configs.errors import LoraLoadFailed, ModelLoadFailed
from configs.pipeline_fields import LORA_NAME
from configs.pipeline_settings import LoraSource, PipelineSettings
from routing.parameters import Lora
from workers.denoiser.failure_cause import is_out_of_memory, short_cause
from workers.devices.device_chunk import denoisers

_logger = logging.getLogger(__name__)

_ENDING = ".safetensors"
# The file that diffusers writes into a folder of its own for each adapter.
_USUAL_FILE = "pytorch_lora_weights.safetensors"

AdapterSet = tuple[Lora, ...]


@dataclass(slots=True)
class _Loaded:
    """An adapter that is in the modules, under a name that PEFT has never had before."""

    peft_name: str
    users: int = 0


class Adapters:
    """The adapters that requests to one pipeline may name."""

    def __init__(self, pipe: Any, settings: PipelineSettings) -> None:
        """Find the adapters of `settings`; none is loaded yet.

        Raises:
            ModelLoadFailed: The family takes none, or a name stands for two adapters.
        """
        self._pipe = pipe
        self._sources = _sources(settings)
        self._most = settings.max_cpu_loras
        self._numbers = count()
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        self._text_set: AdapterSet | None = ()
        if self._sources and not hasattr(pipe, "load_lora_weights"):
            raise ModelLoadFailed(
                f"engine_args.lora_modules: {type(pipe).__name__} takes no adapters; "
                "leave lora_modules and lora_dir out"
            )
        self._text_encoders = [
            part
            for name, part in pipe.components.items()
            if name.startswith("text_encoder") and isinstance(part, torch.nn.Module)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters by the names that requests use, sorted."""
        return tuple(sorted(self._sources))

    @property
    def loaded(self) -> tuple[str, ...]:
        """Those in the modules now, the one used longest ago first."""
        return tuple(self._loaded)

    @contextmanager
    def ready(
        self, wanted: AdapterSet, keep_still: Callable[[], AbstractContextManager[Any]]
    ) -> Iterator[None]:
        """Have the adapters of a request loaded as long as it runs, and the text encoders set.

        The caller has the turn to encode; forwards of the denoiser wait inside `keep_still()`.

        Raises:
            LoraLoadFailed: An adapter can not be read or does not fit; nothing of it stays.
        """
        missing = [each.name for each in wanted if each.name not in self._loaded]
        if missing:
            with keep_still():
                self._make_room(wanted)
                for name in missing:
                    self._load(name)
        used = [self._loaded[each.name] for each in wanted]
        for each, entry in zip(wanted, used, strict=True):
            self._loaded.move_to_end(each.name)
            entry.users += 1
        try:
            self._set_text_encoders(wanted)
            yield
        finally:
            for entry in used:
                entry.users -= 1

    def set_denoisers(self, key: Hashable) -> None:
        """Set the denoisers to the adapters of `key`, an :data:`AdapterSet`; None is none."""
        wanted: Any = () if key is None else key
        untyped: Any = denoisers(self._pipe)
        for denoiser in untyped.values():
            if not getattr(denoiser, "peft_config", None):
                continue
            names, scales = self._in(denoiser, wanted)
            if names:
                denoiser.enable_lora()
                denoiser.set_adapters(names, scales)
            else:
                denoiser.disable_lora()

    def text_state(self, wanted: AdapterSet) -> Hashable:
        """Return what the text encoders are for a request that is :meth:`ready`.

        Those of `wanted` that change one of them, and their types, which are float32 for a run that
        did not fit into half.
        """
        encoders = self._text_encoders
        changing = [each for each in wanted if any(self._in(part, (each,))[0] for part in encoders)]
        return (*changing, *(part.dtype for part in encoders))

    def _set_text_encoders(self, wanted: AdapterSet) -> None:
        if wanted == self._text_set:
            return
        self._text_set = None
        for encoder in self._text_encoders:
            if not getattr(encoder, "peft_config", None):
                continue
            names, scales = self._in(encoder, wanted)
            if names:
                enable_lora_for_text_encoder(encoder)
                set_adapters_for_text_encoder(names, encoder, scales)
            else:
                disable_lora_for_text_encoder(encoder)
        self._text_set = wanted

    def _in(self, module: Any, wanted: AdapterSet) -> tuple[list[str], list[float]]:
        """Those of `wanted` that change `module`: their names for PEFT, and their scales."""
        known = getattr(module, "peft_config", None) or {}
        here = [(self._loaded[each.name].peft_name, each.scale) for each in wanted]
        here = [(name, scale) for name, scale in here if name in known]
        return [name for name, _ in here], [scale for _, scale in here]

    def _make_room(self, wanted: AdapterSet) -> None:
        """Remove the adapters used longest ago; those that run stay, however many they are."""
        needed = {each.name for each in wanted}
        coming = len(needed - self._loaded.keys())
        idle = [n for n, entry in self._loaded.items() if not entry.users and n not in needed]
        for name in idle[: max(len(self._loaded) + coming - self._most, 0)]:
            self._text_set = None
            self._delete(self._loaded.pop(name).peft_name)
            _logger.info("adapter %s was removed to make room", name)

    def _load(self, name: str) -> None:
        source = self._sources.get(name)
        if source is None:
            raise LoraLoadFailed(f"lora: there is no adapter {name!r}; {_known(self.names)}")
        peft_name = f"adapter{next(self._numbers)}"
        self._text_set = None
        options = {"weight_name": source.weight_name, "revision": source.revision}
        try:
            with _quiet():
                self._pipe.load_lora_weights(
                    source.path,
                    adapter_name=peft_name,
                    local_files_only=source.is_local,
                    use_safetensors=True,
                    **{key: value for key, value in options.items() if value is not None},
                )
            parts = self._parts_with(peft_name)
            reason = None if parts else "it changes no part of this model"
            for part in parts:
                part.eval()  # its new layers are not
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _logger.exception("adapter %s could not be loaded", name)
            reason = short_cause(error)
        if reason is not None:
            self._delete(peft_name)
            raise LoraLoadFailed(f"lora: {name!r} could not be loaded: {reason}")
        self._loaded[name] = _Loaded(peft_name)

    def _parts_with(self, peft_name: str) -> list[Any]:
        parts = (*denoisers(self._pipe).values(), *self._text_encoders)
        return [part for part in parts if peft_name in (getattr(part, "peft_config", None) or {})]

    def _delete(self, peft_name: str) -> None:
        with _quiet():
            self._pipe.delete_adapters([peft_name])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PEFT's warnings that there are several adapters, and that one in use was removed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        yield


def _known(names: tuple[str, ...]) -> str:
    return f"known are {', '.join(names)}" if names else "this stage has none"


def _sources(settings: PipelineSettings) -> Mapping[str, LoraSource]:
    """The adapters by name: those of `lora_modules`, and the files of `lora_dir`."""
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
