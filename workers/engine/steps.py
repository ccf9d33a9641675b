"""The step of a noise scheduler, watched so that neither the pipeline nor diffusers notices."""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from workers.patches import method_signature


class WatchedStep:
    """Stands over the `step` of one scheduler.

    It returns what `after` makes of the result, whose item 0 is the sample, and of the timestep.

    Pipelines of flow models pass the step no generator, as most of their schedulers draw nothing.
    One that does would draw from the generator of the process, so it gets `generators`, one for
    each sample.

    Some pipelines copy their scheduler when they are called, and step the copies: for the sound
    beside the pictures (LTX-2), or for each frame (SkyReels-V2). A copy is watched as well. The
    steps of whichever is stepped first are those of the run; after a step of another there is only
    a call of `beside`.
    """

    def __init__(
        self,
        scheduler: Any,
        after: Callable[[Any, Any], Any],
        generators: Sequence[torch.Generator] = (),
        beside: Callable[[], None] = lambda: None,
        first: "list[weakref.ref[WatchedStep]] | None" = None,
    ) -> None:
        """Watch `scheduler`; its copies share `first`, which holds the one whose steps count."""
        # Weakly, for together they would keep a scheduler's tensors until they are collected.
        self._scheduler = weakref.ref(scheduler)
        self._step = type(scheduler).step
        # The pipelines look at the signature to decide whether to pass `generator` and `eta`: a
        # wrapper that hides it would drop the seeds without a word.
        self.__signature__, self._places = _signature_and_places(self._step)
        self._after, self._generators, self._beside = after, generators, beside
        self._first = [] if first is None else first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Step the scheduler."""
        sample_at, time_at, generator_at = self._places
        if len(args) <= generator_at and kwargs.get("generator") is None:
            sample = args[sample_at] if len(args) > sample_at >= 0 else kwargs.get("sample")
            if sample is not None and len(sample) == len(self._generators):
                kwargs["generator"] = self._generators
        result = self._step(self._scheduler(), *args, **kwargs)
        if not self._first:
            self._first.append(weakref.ref(self))
        if self._first[0]() is self:
            time = args[time_at] if len(args) > time_at >= 0 else kwargs.get("timestep")
            return self._after(result, time)
        self._beside()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchedStep":
        # A scheduler that is being copied is there already; of its attributes alone there is none.
        copied = memo.get(id(self._scheduler()))
        if copied is None:
            return self
        return WatchedStep(copied, self._after, self._generators, self._beside, self._first)


class Pace:
    """Holds Python back, which runs ahead of the device: to one step, and not more.

    So the device need not wait for the next step, and what is told of a run, and how soon it ends
    once it is told to, stays true to a step.
    """

    def __init__(self) -> None:
        """No step was made yet."""
        self._before: Any = None

    def keep(self, made: Any) -> None:
        """Note a step that the device was given, an event behind it; wait for the one before."""
        before, self._before = self._before, made
        if before is not None:
            before.synchronize()


@functools.cache
def _signature_and_places(step: Any) -> tuple[inspect.Signature, tuple[int, int, int]]:
    """Return the signature of a method `step`, and where it takes sample, timestep and generator.

    -1 is no position.
    """
    signature = method_signature(step)
    names = list(signature.parameters)
    sample, time, generator = (
        names.index(name) if name in names else -1 for name in ("sample", "timestep", "generator")
    )
    return signature, (sample, time, generator)


def steps_from(scheduler: Any, time: Any) -> int:
    """Return how many steps there are from the timestep `time` to the last, both counted."""
    times = torch.as_tensor(scheduler.timesteps).tolist()
    one = isinstance(time, (int, float)) or (torch.is_tensor(time) and time.numel() == 1)
    here = float(time) if one else None
    return len(times) - (times.index(here) if here in times else 0)
