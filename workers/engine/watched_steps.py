"""The step of a noise scheduler, seen by the run that it belongs to. Knows no runs."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from workers.denoiser.method_signatures import method_signature


def watch_steps(
    scheduler: Any,
    after_step: Callable[[Any, Any], Any],
    generators: Callable[[], list[torch.Generator]] = list,
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Make `scheduler.step` return what `after_step` makes of its result and its timestep.

    Item 0 of the result is the sample.

    Pipelines of flow models pass it no generator, as most of their schedulers draw nothing. One
    that does would draw from the generator of the process, so it gets `generators`, one for each
    sample.

    Some pipelines copy their scheduler when they are called, and step the copies: for the sound
    beside the pictures (LTX-2), or for each frame (SkyReels-V2). Copies are watched as well. The
    steps of whichever is stepped first are those of the run; after a step of another there is only
    a call of `beside`.
    """
    watch = _Watch(after_step, generators, beside)
    scheduler.step = _WatchedStep(scheduler, watch)


class _Watch:
    """What is done after the steps of a scheduler and of its copies."""

    def __init__(
        self,
        after_step: Callable[[Any, Any], Any],
        generators: Callable[[], list[torch.Generator]],
        beside: Callable[[], None],
    ) -> None:
        self._after_step = after_step
        self._beside = beside
        self.generators = generators
        self._first: Callable[[], _WatchedStep | None] | None = None

    def after(self, step: "_WatchedStep", result: Any, time: Any) -> Any:
        if self._first is None:
            self._first = weakref.ref(step)
        if step is self._first():
            return self._after_step(result, time)
        self._beside()
        return result


class _WatchedStep:
    """Stands as `step` on one scheduler, and on a copy of it as the copy's own."""

    def __init__(self, scheduler: Any, watch: _Watch) -> None:
        step = type(scheduler).step
        # The pipelines look at the signature to decide whether to pass `generator` and `eta`: a
        # wrapper that hides it would drop the seeds without a word.
        self.__signature__ = method_signature(step)
        # Weakly, for together they would keep a scheduler's tensors until they are collected.
        self._scheduler = weakref.ref(scheduler)
        self._step, self._watch = step, watch
        names = list(self.__signature__.parameters)
        # By position or by name; -1 is no position.
        self._sample_at, self._time_at, self._generator_at = (
            names.index(name) if name in names else -1
            for name in ("sample", "timestep", "generator")
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) <= self._generator_at and kwargs.get("generator") is None:
            own, at = self._watch.generators(), self._sample_at
            sample = args[at] if len(args) > at >= 0 else kwargs.get("sample")
            if sample is not None and len(sample) == len(own):
                kwargs["generator"] = own
        time = args[self._time_at] if len(args) > self._time_at >= 0 else kwargs.get("timestep")
        return self._watch.after(self, self._step(self._scheduler(), *args, **kwargs), time)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_WatchedStep":
        # A scheduler that is being copied is there already; of its attributes alone there is none.
        copied = memo.get(id(self._scheduler()))
        return self if copied is None else _WatchedStep(copied, self._watch)


def steps_from(scheduler: Any, time: Any) -> int:
    """Return how many steps there are from the timestep `time` to the last, both counted."""
    times = list(map(float, scheduler.timesteps))
    one = isinstance(time, (int, float)) or (torch.is_tensor(time) and time.numel() == 1)
    here = float(time) if one else None
    return len(times) - (times.index(here) if here in times else 0)
