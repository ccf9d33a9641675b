"""Runs a group of denoiser calls: as one forward where that is right, one by one where it is not.

The first merged forward of a signature proves itself: its parts also run alone, and if the two
differ by more than rounding the signature is never merged again. Does not know who waits for whom.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workers.batch_lesson import BatchLesson
from workers.failure_cause import is_out_of_memory, short_cause
from workers.forward_cost import ForwardCost
from workers.member import Member
from workers.merging import Layout, Unmergeable, layout, merge, split
from workers.rounding import excess
from workers.row_choice import choose_rows, place_rows

_logger = logging.getLogger(__name__)

Forward = Callable[..., Any]


class Call:
    """One call of a denoiser by one pipeline, and what became of it.

    Attributes:
        member: Whose it is.
        requests: How many requests have rows in it.
        layout: None where it must run alone.
        lesson: What was learnt about its kind; calls of one lesson may share a forward.
        arrived: When it came, on the rendezvous' clock.
        shared: How many requests its forward served, its own included.
    """

    def __init__(
        self,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        member: Member,
        arrived: float,
    ) -> None:
        """Take the call as it came."""
        self.forward = forward
        self.args = args
        self.kwargs = kwargs
        self.member = member
        self.requests = len(member.present)
        self.arguments: Mapping[str, Any] = {}
        self.layout: Layout | None = None
        self.lesson: BatchLesson | None = None
        self.arrived = arrived
        self.shared = self.requests
        self.output: Any = None
        self.error: BaseException | None = None
        self.done = False

    @property
    def kind(self) -> Any:
        """Calls of equal kinds may share a forward; None shares with nobody."""
        if self.layout is None:
            return None
        return self.forward, self.member.key, self.layout.signature

    @property
    def rows(self) -> int:
        """Samples in the call; 0 where it could not be told."""
        return 0 if self.layout is None else self.layout.rows

    @property
    def row_counts(self) -> list[int]:
        """Samples of each request; of all together where they are not alike."""
        if self.rows % self.requests:
            return [self.rows]
        return [self.rows // self.requests] * self.requests

    def describe(self, names: Sequence[str]) -> None:
        """Find out its layout; `names` are those of the forward's arguments, in their order."""
        if len(self.args) > len(names):  # which the call itself will raise, in its turn
            return
        self.arguments = dict(zip(names, self.args, strict=False)) | self.kwargs
        try:
            self.layout = layout(self.arguments)
        except Unmergeable as error:
            _warn_once(error.name)

    def parts(self, size: int | None = None) -> "list[tuple[Call, list[int]]]":
        """Return it cut into calls of `size` requests, with the rows that each has of it.

        Without a size, into as large ones as are allowed. Rows of requests that left are in none.
        Empty where it is to run as it is.
        """
        present = self.member.present
        if len(present) == 1 or self.lesson is None or self.rows % len(present):
            return []
        each = self.rows // len(present)
        # Guidance and the like repeat all samples, in their order.
        rows = [
            list(range(request, self.rows, len(present)))
            for request, here in enumerate(present)
            if here
        ]
        size = size or self.lesson.most(each, len(rows))
        if size == len(present) or not rows:
            return []
        return [self._part(rows[first : first + size]) for first in range(0, len(rows), size)]

    def _part(self, rows: list[list[int]]) -> "tuple[Call, list[int]]":
        assert self.layout is not None
        places = sorted(itertools.chain.from_iterable(rows))
        arguments = choose_rows(self.arguments, places, self.rows)
        part = Call(self.forward, (), arguments, self.member, self.arrived)
        part.arguments, part.lesson = arguments, self.lesson
        part.layout = replace(self.layout, rows=len(places))
        part.requests = part.shared = len(rows)
        return part, places

    def gather(self, parts: "Sequence[tuple[Call, list[int]]]") -> None:
        """Take the outputs of the parts that :meth:`parts` returned, or the first error."""
        errors = [part.error for part, _ in parts if part.error is not None]
        for part, _ in parts:
            part.error = None
        if errors:
            self.error = errors[0]
            return
        outputs = [part.output for part, _ in parts]
        self.output = place_rows(outputs, [places for _, places in parts], self.rows)

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
    """Give each call its output or its error; several calls are of one kind."""
    failure, scarce = None, False
    asked = [each for call in group for each in call.row_counts]
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
        lesson.limit(asked)
    elif failure is not None and all(call.error is None for call in group):
        lesson.proven = False


def _run_alone(call: Call, lesson: BatchLesson) -> None:
    call.shared = call.requests
    try:
        with ForwardCost(_device(call)) as cost:
            call.output = call.forward(*call.args, **call.kwargs)
        if call.layout is not None:
            lesson.note(call.row_counts, cost.seconds)
            lesson.note_memory(call.rows, cost.peak_bytes, cost.free_bytes)
            _weigh([call], lesson, cost.seconds)
    except BaseException as error:  # noqa: BLE001 - raised in the thread whose call it is
        call.error = error
    if call.requests > 1 and call.error is not None and is_out_of_memory(call.error):
        lesson.limit(call.row_counts)
        _run_in_parts(call, lesson)


def _run_in_parts(call: Call, lesson: BatchLesson) -> None:
    """Run a call that was too large for the memory by smaller ones."""
    parts = call.parts()
    if not parts:
        return
    _logger.warning("%d requests together need too much memory, they run by parts", call.requests)
    call.error = None
    torch.cuda.empty_cache()
    for part, _ in parts:
        _run_alone(part, lesson)
    call.gather(parts)


def _run_merged(group: Sequence[Call], lesson: BatchLesson) -> bool:
    """Run the group as one forward; False where its calls have to run one by one."""
    first, rows = group[0], [call.rows for call in group]
    assert first.layout is not None
    try:
        merged = merge([call.arguments for call in group], rows)
        with ForwardCost(first.layout.device) as cost:
            output = first.forward(**merged)
        parts = split(output, rows, first.layout.form)
    except Unmergeable as error:
        if error.name == "output":
            lesson.proven = False
            _warn_once(error.name)
        return False
    if lesson.proven is None:
        _prove(group, parts, lesson)
    else:
        shared = sum(call.requests for call in group)
        for call, part in zip(group, parts, strict=True):
            call.output, call.shared = part, shared
    lesson.note([each for call in group for each in call.row_counts], cost.seconds)
    lesson.note_memory(sum(rows), cost.peak_bytes, cost.free_bytes)
    _weigh(group, lesson, cost.seconds)
    return True


def _weigh(group: Sequence[Call], lesson: BatchLesson, together_s: float) -> None:
    """Where requests together seem slower than one by one, see what they take one by one."""
    counts = [each for call in group for each in call.row_counts]
    if not lesson.doubts(counts):
        return
    alone_s = 0.0
    for call in group:
        for part in [part for part, _ in call.parts(size=1)] or [call]:
            with ForwardCost(_device(part)) as cost:
                part.forward(**part.arguments)
            alone_s += cost.seconds
            lesson.note(part.row_counts, cost.seconds)
    lesson.weigh(counts, together_s, alone_s)


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


def _device(call: Call) -> torch.device | None:
    return None if call.layout is None else call.layout.device


@functools.cache
def _warn_once(name: str) -> None:
    _logger.warning(
        "%s: no rule says how to merge it; denoiser calls that have it run alone, which is right"
        " and shares nothing",
        name,
    )
