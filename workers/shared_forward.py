"""Runs a group of denoiser calls: as one forward where that is right, one by one where it is not.

The first merged forward of a signature proves itself: its parts also run alone, and if the two
differ by more than rounding the signature is never merged again. Does not know who waits for whom.
"""

import functools
import inspect
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from workers.batch_lesson import BatchLesson
from workers.merging import Layout, Unmergeable, layout, merge, split
from workers.pipeline_loader import is_out_of_memory, short_cause
from workers.rounding import excess

_logger = logging.getLogger(__name__)

Forward = Callable[..., Any]


class Call:
    """One call of a denoiser by one request, and what became of it.

    Attributes:
        key: What the denoiser must be set to.
        layout: None where it must run alone.
        arrived: When it came, on the rendezvous' clock.
        shared: How many calls its forward had, this one included.
    """

    def __init__(
        self,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Hashable,
        arrived: float,
    ) -> None:
        """Take the call as it came."""
        self.forward = forward
        self.args = args
        self.kwargs = kwargs
        self.key = key
        self.arguments: Mapping[str, Any] = {}
        self.layout: Layout | None = None
        self.arrived = arrived
        self.shared = 1
        self.output: Any = None
        self.error: BaseException | None = None
        self.done = False

    @property
    def signature(self) -> Any:
        """Calls of equal signatures may share a forward; None shares with nobody."""
        return None if self.layout is None else (self.forward, self.key, self.layout.signature)

    @property
    def rows(self) -> int:
        """Samples in the call; 0 where it could not be told."""
        return 0 if self.layout is None else self.layout.rows

    def describe(self, signature: inspect.Signature) -> None:
        """Find out its layout, from the arguments under the names of `signature`."""
        try:
            self.arguments = signature.bind(*self.args, **self.kwargs).arguments
        except TypeError:  # which the call itself will raise, in its turn
            return
        try:
            self.layout = layout(self.arguments)
        except Unmergeable as error:
            _warn_once(error.name)

    def result(self) -> Any:
        """Return the output, or raise what the forward raised."""
        error, self.error = self.error, None
        if error is None:
            return self.output
        try:
            raise error
        finally:
            # An error that its own traceback holds would keep the tensors of the run.
            del error


def run_group(group: Sequence[Call], lesson: BatchLesson) -> None:
    """Give each call its output or its error; several calls have equal signatures."""
    failure = None
    if len(group) > 1:
        try:
            if _run_merged(group, lesson):
                return
        except BaseException as error:  # noqa: BLE001 - whose it is shows when they run one by one
            failure = short_cause(error)
            scarce = is_out_of_memory(error)
    # Out here, where no traceback holds the memory of the merged forward any more.
    if failure is not None:
        _logger.warning("%d calls together failed, each runs alone: %s", len(group), failure)
        torch.cuda.empty_cache()
    for call in group:
        _run_alone(call, lesson)
    if failure is not None and scarce:
        lesson.limit([call.rows for call in group])
    elif failure is not None and all(call.error is None for call in group):
        lesson.proven = False


def _run_alone(call: Call, lesson: BatchLesson) -> None:
    call.shared = 1
    try:
        started = time.perf_counter()
        call.output = call.forward(*call.args, **call.kwargs)
        _finish(call)
        if call.layout is not None:
            lesson.note([call.rows], time.perf_counter() - started)
    except BaseException as error:  # noqa: BLE001 - raised in the thread whose call it is
        call.error = error


def _run_merged(group: Sequence[Call], lesson: BatchLesson) -> bool:
    """Run the group as one forward; False where its calls have to run one by one."""
    first, rows = group[0], [call.rows for call in group]
    assert first.layout is not None
    try:
        merged = merge([call.arguments for call in group], rows)
        started = time.perf_counter()
        output = first.forward(**merged)
        _finish(first)
        seconds = time.perf_counter() - started
        parts = split(output, rows, first.layout.form)
    except Unmergeable as error:
        if error.name == "output":
            lesson.proven = False
            _warn_once(error.name)
        return False
    if lesson.proven is None:
        _prove(group, parts, lesson)
    else:
        for call, part in zip(group, parts, strict=True):
            call.output, call.shared = part, len(group)
    lesson.note(rows, seconds)
    return True


def _prove(group: Sequence[Call], parts: Sequence[Any], lesson: BatchLesson) -> None:
    for call in group:
        _run_alone(call, lesson)
    if any(call.error is not None for call in group):
        return
    worst = max(excess(part, call.output) for call, part in zip(group, parts, strict=True))
    lesson.proven = worst <= 1
    if not lesson.proven:
        _logger.warning(
            "denoiser calls of this kind are not shared: merged they differ from what each gives"
            " alone, %.3g times as much as rounding may",
            worst,
        )


def _finish(call: Call) -> None:
    """Wait for the device, so that the time is that of the work and errors come from here."""
    if call.layout is not None and call.layout.device.type == "cuda":
        torch.cuda.current_stream(call.layout.device).synchronize()


@functools.cache
def _warn_once(name: str) -> None:
    _logger.warning(
        "%s: no rule says how to merge it; denoiser calls that have it run alone, which is right"
        " and shares nothing",
        name,
    )
