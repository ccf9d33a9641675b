"""LoRA adapters of one pipeline: loaded when a request names them, set when its calls run.

PEFT keeps which adapters are active, and their scales, inside the shared modules. So nothing is set
for each request's thread: text encoders are set while the request has the turn to encode, denoisers
by the rendezvous (`set_denoisers` is its switch) before the forwards of a set. Loading and removing
change the modules and happen while both are kept still. Knows no family, and not where adapters
come from.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from configs.errors import LoraLoadFailed, ModelLoadFailed
from configs.pipeline_settings import PipelineSettings
from routing.parameters import Lora
from workers.denoiser.failure_cause import is_out_of_memory, short_cause
from workers.engine.adapted_parts import AdaptedParts, Scaled
from workers.engine.adapter_sources import adapter_sources

_logger = logging.getLogger(__name__)

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
