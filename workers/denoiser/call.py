"""One call of a denoiser by one pipeline: what it is like, its parts, and what became of it.

Does not know with which others it runs.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workers.denoiser.batch_lesson import BatchLesson
from workers.denoiser.member import Member
from workers.denoiser.merging import Layout, Unmergeable, layout
from workers.denoiser.row_choice import choose_rows, place_rows

_logger = logging.getLogger(__name__)

Forward = Callable[..., Any]


class Call:
    """One call of a denoiser by one pipeline, and what became of it.

    Attributes:
        member: Whose it is.
        owners: The requests that have rows in it, by their numbers among those of the member.
        outputs: For each of them, how many outputs it has.
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
        self.owners: Sequence[int] = range(len(member.outputs))
        self.outputs: Sequence[int] = member.outputs
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
    def requests(self) -> int:
        """How many requests have rows in it."""
        return len(self.owners)

    @property
    def rows(self) -> int:
        """Samples in the call; 0 where it could not be told."""
        return 0 if self.layout is None else self.layout.rows

    @property
    def row_counts(self) -> list[int]:
        """Samples of each request; of all together where they are not alike."""
        repeats, odd = divmod(self.rows, sum(self.outputs))
        return [self.rows] if odd else [repeats * outputs for outputs in self.outputs]

    def describe(self, names: Sequence[str]) -> None:
        """Find out its layout; `names` are those of the forward's arguments, in their order."""
        if len(self.args) > len(names):  # which the call itself will raise, in its turn
            return
        self.arguments = self.kwargs
        if self.args:
            self.arguments = dict(zip(names, self.args, strict=False)) | self.kwargs
        try:
            self.layout = self.member.layouts.layout(self.arguments, layout)
        except Unmergeable as error:
            warn_once(error.name)

    def parts(self, size: int | None = None) -> "list[tuple[Call, list[int]]]":
        """Return it cut into calls of `size` requests, with the rows that each has of it.

        Without a size, into as large ones as are allowed. Rows of requests that left are in none.
        Empty where it is to run as it is.
        """
        if self.requests == 1 or self.lesson is None or self.rows % sum(self.outputs):
            return []
        counts, present = self.row_counts, self.member.present
        here = [index for index, owner in enumerate(self.owners) if present[owner]]
        cut = []
        while here:
            most = size or self.lesson.most([counts[index] for index in here])
            cut.append(here[:most])
            here = here[most:]
        if not cut or len(cut[0]) == self.requests:
            return []
        return [self._part(each) for each in cut]

    def _part(self, indices: Sequence[int]) -> "tuple[Call, list[int]]":
        assert self.layout is not None
        ends = list(itertools.accumulate(self.outputs))
        # Guidance and the like repeat all samples, in their order.
        places = sorted(
            place
            for index in indices
            for first in range(ends[index] - self.outputs[index], ends[index])
            for place in range(first, self.rows, ends[-1])
        )
        arguments = choose_rows(self.arguments, places, self.rows)
        part = Call(self.forward, (), arguments, self.member, self.arrived)
        part.arguments, part.lesson = arguments, self.lesson
        part.layout = replace(self.layout, rows=len(places))
        part.owners = [self.owners[index] for index in indices]
        part.outputs = [self.outputs[index] for index in indices]
        part.shared = part.requests
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


@functools.cache
def warn_once(name: str) -> None:
    """Say that calls with this argument run alone, once in a process."""
    _logger.warning(
        "%s: no rule says how to merge it; denoiser calls that have it run alone, which is right"
        " and shares nothing",
        name,
    )
