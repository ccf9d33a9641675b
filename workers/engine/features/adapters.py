"""LoRA adapters of one pipeline: loaded when a request names them, set when its calls run."""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from diffusers.loaders.lora_base import (
    disable_lora_for_text_encoder,
    enable_lora_for_text_encoder,
    set_adapters_for_text_encoder,
)
from peft.tuners.lora import LoraLayer

from configs.adapter_fields import LORA_NAME, LoraSource
from configs.errors import LoraLoadFailed, ModelLoadFailed
from configs.parameters import Abilities, Lora
from configs.stage_config import PipelineSettings
from workers.devices.chunk import denoisers
from workers.engine.loading.adapter_files import (
    ENDING,
    PEFT_CONFIG,
    PEFT_FILE,
    USUAL_FILE,
    AdapterFile,
    UnreadableAdapter,
    found_file,
)
from workers.engine.run import Feature, Parts, Run
from workers.failures import is_out_of_memory, short_cause
from workers.sharing.rendezvous import Rendezvous

_logger = logging.getLogger(__name__)


# The largest share of an adapter's weights that may find no place in the model: with less than half
# of them the picture is another than the adapter was trained for.
MOST_LOST = 0.5


def adapter_sources(settings: PipelineSettings) -> Mapping[str, LoraSource]:
    """Return the adapters by name: those of `lora_modules`, and the files of `lora_dir`.

    Raises:
        ModelLoadFailed: A name stands for two adapters.
    """
    found = dict(settings.lora_modules)
    for path in sorted(Path(settings.lora_dir).iterdir()) if settings.lora_dir else ():
        name = path.name.removesuffix(ENDING)
        if path.is_dir() and (path / USUAL_FILE).is_file():
            source = LoraSource(str(path), USUAL_FILE)
        elif (path / PEFT_CONFIG).is_file() and (path / PEFT_FILE).is_file():
            source = LoraSource(str(path), PEFT_FILE)
        elif path.suffix == ENDING and path.is_file():
            source = LoraSource(str(path.parent), path.name)
        else:
            continue
        if not LORA_NAME.match(name):
            _logger.warning("%s is left out: %r is no name for an adapter", path, name)
            continue
        if name in found:
            raise ModelLoadFailed(
                f"engine_args.lora_dir: {name!r} names two adapters, {found[name].path} "
                f"and {path}; rename one"
            )
        found[name] = source
    return found


# Adapters by their names for PEFT, and the scale of each.
Scaled = tuple[tuple[str, float], ...]


class AdaptedParts:
    """The denoisers and text encoders of one pipeline."""

    def __init__(self, pipe: Any) -> None:
        """Find the parts; those of a family that supports no adapters are never changed."""
        self._pipe = pipe
        self._text_active: Scaled | None = ()
        self._text_encoders: list[Any] = [
            part
            for name, part in pipe.components.items()
            if name.startswith("text_encoder") and isinstance(part, torch.nn.Module)
        ]

    def put_in(self, source: LoraSource, name: str) -> tuple[str, ...]:
        """Load an adapter under a name that PEFT has never had; return what is to be said of it.

        Raises:
            UnreadableAdapter: It changes no part, too little of one, or is of another kind.
            Exception: Whatever diffusers raises where it cannot be read or does not fit; some of
                it may be in by then.
        """
        self._text_active = None
        file = found_file(source)
        options = {"weight_name": source.weight_name, "revision": source.revision}
        weights: Any = source.path
        if file is not None:
            file.refuse_foreign()
            options["weight_name"] = file.path.name
        # Layers that are made in inference mode stay so, which quantized weights cannot be in.
        with _quiet(), torch.inference_mode(mode=False), torch.no_grad():
            if file is not None and file.peft is not None:
                weights = file.weights(next(iter(denoisers(self._pipe))))
            self._pipe.load_lora_weights(
                weights,
                adapter_name=name,
                local_files_only=source.is_local,
                use_safetensors=True,
                **{key: value for key, value in options.items() if value is not None},
            )
        changed = [part for part in self._all() if _knows(part, name)]
        for part in changed:
            part.eval()  # its new layers are not
        if not changed:
            raise UnreadableAdapter("it changes no part of this model")
        return () if file is None else tuple(self._said_of(file, name))

    def _said_of(self, file: AdapterFile, name: str) -> Iterator[str]:
        """Yield sentences on what of a file found no place; refuse one that lost too much."""
        whole = file.up_elements
        placed = sum(_up_elements(part, name) for part in self._all() if _knows(part, name))
        lost = max(1 - placed / whole, 0.0) if whole else 0.0
        if lost > MOST_LOST:
            raise UnreadableAdapter(
                f"{lost:.0%} of its weights found no place in this model; use one of its family"
            )
        if file.others:
            yield f"its folder has {file.others + 1} files; {file.path.name} was used"
        if file.changes_text and not self.changes_text(name):
            yield "its part for a text encoder was left out: this family takes none"
        if lost > 0:
            yield f"{max(lost, 0.01):.0%} of its weights found no place in this model"

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

    def _denoisers(self) -> Iterable[Any]:
        return denoisers(self._pipe).values()

    def _all(self) -> tuple[Any, ...]:
        return (*self._denoisers(), *self._text_encoders)


def _knows(part: Any, name: str) -> bool:
    return name in (getattr(part, "peft_config", None) or {})


def _up_elements(part: Any, name: str) -> int:
    """Numbers in the matrices of an adapter that lead back to the layers of a part."""
    found = [
        layer.lora_B[name].get_parameter("weight")
        for layer in part.modules()
        if isinstance(layer, LoraLayer) and name in layer.lora_B
    ]
    return sum(each.numel() for each in found)


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
    said: tuple[str, ...] = ()
    users: int = 0


# What the denoisers are set to after adapters were loaded; equal to no set.
_UNKNOWN = object()


class Adapters(Feature):
    """The adapters that requests to one pipeline may name.

    Where requests run at once, the rendezvous has the denoisers set to those of each call.
    """

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """Return those of the stage; None where it has none."""
        adapters = cls(parts.pipe, parts.settings, parts.rendezvous)
        return adapters if adapters.names else None

    def __init__(
        self, pipe: Any, settings: PipelineSettings, rendezvous: Rendezvous | None = None
    ) -> None:
        """Find the adapters of `settings`; none is loaded yet.

        Raises:
            ModelLoadFailed: The family supports none, or a name stands for two adapters.
        """
        self._sources = adapter_sources(settings)
        self._most = settings.max_cpu_loras
        self._numbers = count()
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        if self._sources and not hasattr(pipe, "load_lora_weights"):
            raise ModelLoadFailed(
                f"engine_args.lora_modules: {type(pipe).__name__} supports no adapters; "
                "leave lora_modules and lora_dir out"
            )
        self._parts = AdaptedParts(pipe)
        self._denoisers_set_to: Any = ()
        self._rendezvous = rendezvous
        if rendezvous is not None:
            rendezvous.switch = self._set_denoisers

    def offers(self, abilities: Abilities) -> Abilities:
        """Offer the adapters."""
        return replace(abilities, loras=self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters by the names that requests use, sorted."""
        return tuple(sorted(self._sources))

    @property
    def loaded(self) -> tuple[str, ...]:
        """Those in the modules now, the one used longest ago first."""
        return tuple(self._loaded)

    @property
    def in_use(self) -> tuple[str, ...]:
        """Those of them that a request runs with now."""
        return tuple(name for name, entry in self._loaded.items() if entry.users)

    @contextmanager
    def around_call(self, run: Run) -> Iterator[None]:
        """Have the adapters of a run loaded as long as it runs, and the text encoders set.

        Raises:
            LoraLoadFailed: An adapter cannot be read or does not fit; nothing of it stays.
        """
        wanted = run.slots[0].parameters.lora
        missing = [each.name for each in wanted if each.name not in self._loaded]
        if missing:
            # Forwards of others wait meanwhile.
            with nullcontext() if self._rendezvous is None else self._rendezvous.held():
                self._denoisers_set_to = _UNKNOWN
                self._make_room(wanted)
                for name in missing:
                    self._load(name)
        used = [self._loaded[each.name] for each in wanted]
        for each, entry in zip(wanted, used, strict=True):
            self._loaded.move_to_end(each.name)
            entry.users += 1
            for slot in run.slots:
                slot.warnings += [f"lora: {each.name!r}: {sentence}" for sentence in entry.said]
        try:
            self._parts.set_text_encoders(self._scaled(wanted))
            if self._rendezvous is None and self._denoisers_set_to != wanted:
                self._denoisers_set_to = _UNKNOWN
                self._set_denoisers(wanted)
                self._denoisers_set_to = wanted
            run.text_state += tuple(
                each
                for each, entry in zip(wanted, used, strict=True)
                if self._parts.changes_text(entry.peft_name)
            )
            yield
        finally:
            for entry in used:
                entry.users -= 1

    def _set_denoisers(self, key: Any) -> None:
        """Set the denoisers to the adapters of `key`, an :data:`AdapterSet`; None is none."""
        self._parts.set_denoisers(self._scaled(key or ()))

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
            raise LoraLoadFailed(f"lora: there is no adapter {name!r}; use {', '.join(self.names)}")
        peft_name = f"adapter{next(self._numbers)}"
        try:
            said, reason = self._parts.put_in(source, peft_name), None
        except UnreadableAdapter as error:
            said, reason = (), str(error)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _logger.exception("adapter %s could not be loaded", name)
            said, reason = (), short_cause(error)
        if reason is not None:
            self._parts.take_out(peft_name)
            raise LoraLoadFailed(f"lora: {name!r} could not be loaded: {reason}")
        self._loaded[name] = _Loaded(peft_name, said)
