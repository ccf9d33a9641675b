"""The step of a noise scheduler, seen by the run that it belongs to. Knows no runs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


def watch_steps(
    scheduler: Any,
    after_step: Callable[[Any], Any],
    generators: Callable[[], list[torch.Generator]] = list,
) -> None:
    """Make `scheduler.step` return what `after_step` makes of its result; item 0 is the sample.

    Pipelines of flow models pass it no generator, as most of their schedulers draw nothing. One
    that does would draw from the generator of the process, so it gets `generators`, one for each
    sample.
    """
    step = scheduler.step
    names = list(inspect.signature(step).parameters)
    # By position or by name; -1 is no position.
    sample_at, generator_at = (
        names.index(name) if name in names else -1 for name in ("sample", "generator")
    )

    # The pipelines look at the signature to decide whether to pass `generator` and `eta`: a wrapper
    # that hides it would drop the seeds without a word.
    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= generator_at and kwargs.get("generator") is None:
            own = generators()
            sample = args[sample_at] if len(args) > sample_at >= 0 else kwargs.get("sample")
            if sample is not None and len(sample) == len(own):
                kwargs["generator"] = own
        return after_step(step(*args, **kwargs))

    scheduler.step = watched
