"""LoRA adapters of one pipeline: loaded when a request names them, set when its calls run."""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
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
from configs.parameters import Lora
from configs.stage_config import PipelineSettings
from configs.stage_fields import LORA_NAME, LoraSource
from workers.devices.chunk import denoisers
from workers.failures import is_out_of_memory, short_cause

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


# Adapters by their names for PEFT, and the scale of each.
Scaled = tuple[tuple[str, float], ...]


class AdaptedParts:
    """The denoisers and text encoders of one pipeline."""

    def __init__(self, pipe: Any) -> None:
        """Find the parts; those of a family that takes no adapters are only never changed."""
        self._pipe = pipe
        self._text_active: Scaled | None = ()
        self._text_encoders: list[Any] = [
            part
            for name, part in pipe.components.items()
            if name.startswith("text_encoder") and isinstance(part, torch.nn.Module)
        ]

    def put_in(self, source: LoraSource, name: str) -> bool:
        """Load an adapter under a name that PEFT has never had; False where it changes no part.

        Raises:
            Exception: Whatever diffusers raises where it cannot be read or does not fit; some of
                it may be in by then.
        """
        self._text_active = None
        options = {"weight_name": source.weight_name, "revision": source.revision}
        # Layers that are made in inference mode stay so, which quantized weights cannot be in.
        with _quiet(), torch.inference_mode(mode=False), torch.no_grad():
            self._pipe.load_lora_weights(
                source.path,
                adapter_name=name,
                local_files_only=source.is_local,
                use_safetensors=True,
                **{key: value for key, value in options.items() if value is not None},
            )
        changed = [part for part in self._all() if _knows(part, name)]
        for part in changed:
            part.eval()  # its new layers are not
        return bool(changed)

    def take_out(self, name: str) -> None:
        """Remove all that is there of an adapter."""
        self._text_active = None
        with _quiet():
            self._pipe.delete_adapters([name])

    def set_denoisers(self, active: Scaled) -> None:
        """Have these adapters, of those that change a denoiser, count in its next forwards."""
        for denoiser in self._denoisers():
            if not getattr(denoiser, "peft_config", None):
                continue
            names, scales = _of(denoiser, active)
            if names:
                denoiser.enable_lora()
                denoiser.set_adapters(names, scales)
            else:
                denoiser.disable_lora()

    def set_text_encoders(self, active: Scaled) -> None:
        """Have these adapters, of those that change a text encoder, count in what it encodes."""
        if active == self._text_active:
            return
        self._text_active = None
        for encoder in self._text_encoders:
            if not getattr(encoder, "peft_config", None):
                continue
            names, scales = _of(encoder, active)
            if names:
                enable_lora_for_text_encoder(encoder)
                set_adapters_for_text_encoder(names, encoder, scales)
            else:
                disable_lora_for_text_encoder(encoder)
        self._text_active = active

    def changes_text(self, name: str) -> bool:
        """Whether an adapter changes a text encoder."""
        return any(_knows(encoder, name) for encoder in self._text_encoders)

    def text_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return what the text encoders compute in: float32 for a run that did not fit in half."""
        return tuple(encoder.dtype for encoder in self._text_encoders)

    def _denoisers(self) -> Iterable[Any]:
        return denoisers(self._pipe).values()

    def _all(self) -> tuple[Any, ...]:
        return (*self._denoisers(), *self._text_encoders)


def _knows(part: Any, name: str) -> bool:
    return name in (getattr(part, "peft_config", None) or {})


def _of(part: Any, active: Scaled) -> tuple[list[str], list[float]]:
    """Those of `active` that change `part`: their names, and their scales."""
    here = [(name, scale) for name, scale in active if _knows(part, name)]
    return [name for name, _ in here], [scale for _, scale in here]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PEFT's warnings that there are several adapters, and that one in use was removed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        yield


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
        self._sources = adapter_sources(settings)
        self._most = settings.max_cpu_loras
        self._numbers = count()
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        if self._sources and not hasattr(pipe, "load_lora_weights"):
            raise ModelLoadFailed(
                f"engine_args.lora_modules: {type(pipe).__name__} takes no adapters; "
                "leave lora_modules and lora_dir out"
            )
        self._parts = AdaptedParts(pipe)

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
            LoraLoadFailed: An adapter cannot be read or does not fit; nothing of it stays.
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
            self._parts.set_text_encoders(self._scaled(wanted))
            yield
        finally:
            for entry in used:
                entry.users -= 1

    def set_denoisers(self, key: Hashable) -> None:
        """Set the denoisers to the adapters of `key`, an :data:`AdapterSet`; None is none."""
        wanted: Any = () if key is None else key
        self._parts.set_denoisers(self._scaled(wanted))

    def text_state(self, wanted: AdapterSet) -> Hashable:
        """Return what the text encoders are for a request that is :meth:`ready`.

        Those of `wanted` that change one of them, and their types, which are float32 for a run that
        did not fit into half.
        """
        changing = (
            each for each in wanted if self._parts.changes_text(self._loaded[each.name].peft_name)
        )
        return (*changing, *self._parts.text_dtypes())

    def _scaled(self, wanted: AdapterSet) -> Scaled:
        return tuple((self._loaded[each.name].peft_name, each.scale) for each in wanted)

    def _make_room(self, wanted: AdapterSet) -> None:
        """Remove the adapters used longest ago; those that run stay, however many they are."""
        needed = {each.name for each in wanted}
        coming = len(needed - self._loaded.keys())
        idle = [n for n, entry in self._loaded.items() if not entry.users and n not in needed]
        for name in idle[: max(len(self._loaded) + coming - self._most, 0)]:
            self._parts.take_out(self._loaded.pop(name).peft_name)
            _logger.info("adapter %s was removed to make room", name)

    def _load(self, name: str) -> None:
        source = self._sources.get(name)
        if source is None:
            raise LoraLoadFailed(f"lora: there is no adapter {name!r}; {_known(self.names)}")
        peft_name = f"adapter{next(self._numbers)}"
        try:
            fits = self._parts.put_in(source, peft_name)
            reason = None if fits else "it changes no part of this model"
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _logger.exception("adapter %s could not be loaded", name)
            reason = short_cause(error)
        if reason is not None:
            self._parts.take_out(peft_name)
            raise LoraLoadFailed(f"lora: {name!r} could not be loaded: {reason}")
        self._loaded[name] = _Loaded(peft_name)


def _known(names: tuple[str, ...]) -> str:
    return f"known are {', '.join(names)}" if names else "this stage has none"
