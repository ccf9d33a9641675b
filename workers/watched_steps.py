"""The step of a noise scheduler, seen by the run that it belongs to. Knows no runs."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch


def watch_steps(
    scheduler: Any,
    after_step: Callable[[Any], Any],
    generators: Callable[[], Sequence[torch.Generator]] = tuple,
) -> None:
    """Make `scheduler.step` return what `after_step` makes of its result; item 0 is the sample.

    Pipelines of flow models pass it no generator, as most of their schedulers draw nothing. One
    that does would draw from the generator of the process, so it gets `generators`, one for each
    sample.
    """
    step = scheduler.step
    names = list(inspect.signature(step).parameters)
    place = names.index("generator") if "generator" in names else None

    # The pipelines look at the signature to decide whether to pass `generator` and `eta`: a wrapper
    # that hides it would drop the seeds without a word.
    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if place is not None and len(args) <= place and kwargs.get("generator") is None:
            kwargs |= _own_generators(generators(), args, kwargs, names)
        return after_step(step(*args, **kwargs))

    scheduler.step = watched


def _own_generators(
    generators: Sequence[torch.Generator],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    names: Sequence[str],
) -> dict[str, Any]:
    sample = (dict(zip(names, args, strict=False)) | kwargs).get("sample")
    if not generators or sample is None or len(sample) != len(generators):
        return {}
    return {"generator": list(generators)}
