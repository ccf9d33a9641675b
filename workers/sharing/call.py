"""One call of a denoiser by one pipeline, whose it is, and what was measured of its kind."""

import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import Any, Protocol

from workers.sharing.merging import Layout, Unmergeable, choose_rows, layout, place_rows

_logger = logging.getLogger(__name__)


_KEPT = 9


_ENOUGH = 5


# Smaller differences are not worth a smaller batch.
_CLEARLY = 1.03


# Forwards until a size is tried or weighed again.
_REST = 200


# Of the memory that is free, the rest is for encoders, autoencoders and fragments.
_USABLE = 0.8


class Cost(Protocol):
    """What a forward took (:class:`workers.sharing.cost.ForwardCost`)."""

    @property
    def known(self) -> bool:
        """Whether it can be read without waiting."""

    @property
    def seconds(self) -> float:
        """Of the work itself."""

    def wait(self) -> None:
        """Wait until it is known."""


class BatchStats:
    """What was measured of merged calls of one kind: whether it is right, and how far it pays.

    Attributes:
        right: Whether a merged forward gave what its parts gave alone; None before the first.
        pads: The same of one for which texts were made longer.
        shown: Where the calls of checked forwards differed (``workers.sharing.checks``); of
            those for which texts were made longer by themselves, under True.
    """

    def __init__(self, reserved_bytes: Callable[[], int] = lambda: 0) -> None:
        """Nothing is known: any number of rows is allowed that leaves the reserved memory free."""
        self._reserved_bytes = reserved_bytes
        self.right: bool | None = None
        self.pads: bool | None = None
        self.shown: dict[bool, set[tuple[str, int]]] = {False: set(), True: set()}
        self._cap: int | None = None
        self._rest = 0
        self._weighed: list[float] = []
        self._row_bytes: float | None = None
        self._fitting: int | None = None
        self._seconds: dict[int, deque[float]] = {}
        self._expected: deque[tuple[Sequence[int], Cost]] = deque()
        self._forwards = 0
        self._memory_at: dict[int, int] = {}

    def allows(self, rows: int) -> bool:
        """Tell whether so many rows of several calls may go together."""
        if self.right is False or (self._cap is not None and rows > self._cap):
            return False
        return self._fitting is None or rows <= self._fitting

    def most(self, rows: Sequence[int]) -> int:
        """Return how many of the requests with so many rows may go together; at least 1.

        They are taken from the first on. Before anything is checked it is one, so that the first
        forward of several is one that the rendezvous merges and checks.
        """
        if self.right is None:
            return 1
        counts = range(len(rows), 1, -1)
        fitting = (count for count in counts if self.allows(sum(rows[:count])))
        return next(fitting, 1)

    def step_s(self, rows: int) -> float | None:
        """Return what a forward of so many rows takes, in seconds; None if it never ran."""
        times = self._seconds.get(rows)
        return median_low(times) if times else None

    def expect(self, rows: Sequence[int], cost: Cost) -> None:
        """Learn what forwards of requests took, as far as the device has done them by now.

        The last one is mostly read with the next, so that nobody waits for it.
        """
        self._expected.append((rows, cost))
        while self._expected and self._expected[0][1].known:
            counts, known = self._expected.popleft()
            self.note(counts, known.seconds)

    def wait(self) -> None:
        """Wait until the last forward is done."""
        if self._expected:
            self._expected[-1][1].wait()

    def note(self, rows: Sequence[int], seconds: float) -> None:
        """Learn what a forward of requests with so many rows took."""
        self._forwards += 1
        self._seconds.setdefault(sum(rows), deque(maxlen=_KEPT)).append(seconds)
        self._rest -= 1
        if self._cap is not None and self._rest <= 0:
            for size in [size for size in self._seconds if size > self._cap]:
                del self._seconds[size]
            self._cap = None

    def doubts(self, rows: Sequence[int]) -> bool:
        """Tell whether a forward of requests with so many rows seems slower than its parts.

        It has to be weighed then: times from different moments of a busy machine prove nothing.
        """
        if len(rows) < 2 or self._rest > 0 or len(self._seconds.get(sum(rows), ())) < _ENOUGH:
            return False
        times = {each: self.step_s(each) for each in set(rows)}
        known = [each for each in map(times.get, rows) if each is not None]
        return len(known) == len(rows) and (self.step_s(sum(rows)) or 0.0) > sum(known)

    def weigh(self, rows: Sequence[int], whole_s: float, parts_s: float) -> None:
        """Learn what requests took together and, right after it, one by one.

        Sizes that are clearly slower, five times weighed, are not tried again for two hundred
        forwards.
        """
        self._weighed.append(whole_s / parts_s)
        if len(self._weighed) == _ENOUGH:
            self._rest = _REST
            if median(self._weighed) > _CLEARLY:
                self.limit(rows)
            self._weighed.clear()

    def wants_memory(self, rows: int) -> bool:
        """Tell whether to look at the memory of the next forward of so many rows.

        It is the same for all of them, and what is free changes slowly.
        """
        seen = self._memory_at.get(rows)
        return seen is None or self._forwards - seen >= _REST

    def note_memory(self, rows: int, peak_bytes: int | None, free_bytes: int | None) -> None:
        """Learn what a forward of so many rows took at most, and what the next may take.

        A forward has a part that does not grow with its rows, so a large one tells more than a
        small one of what a row needs.
        """
        if peak_bytes is None or free_bytes is None or rows < 1:
            return
        self._memory_at[rows] = self._forwards
        needed = peak_bytes / rows
        self._row_bytes = needed if self._row_bytes is None else min(self._row_bytes, needed)
        usable = _USABLE * max(free_bytes - self._reserved_bytes(), 0)
        self._fitting = int(usable / max(self._row_bytes, 1.0))

    def limit(self, rows: Sequence[int]) -> None:
        """Keep later forwards smaller than these requests together, for a while."""
        self._cap = sum(rows) - max(rows)
        self._rest = _REST


class Bell:
    """Wakes one thread; rung before it waits, it does not wait."""

    def __init__(self) -> None:
        """Not rung yet."""
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the thread; ringing twice is ringing once. Under the rendezvous' lock."""
        if self._silence.locked():
            self._silence.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait to be rung, so many seconds at most."""
        self._silence.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Member:
    """It is waited for only between its first call and :meth:`leave`.

    Attributes:
        outputs: For each request that the pipeline was called for, how many outputs it has; their
            samples lie in that order. Of a lone request they count as one, for it is never cut.
        alone: Whether its calls are never merged.
        key: What the denoiser must be set to for its calls, such as its LoRA adapters; calls of
            different keys are never merged.
        present: For each request that the pipeline was called for, whether it still wants its
            samples. Rows of the others are left out of the forwards, where that can be.
        kind: That of its last call, for identity only; None while nobody need wait for it.
        waits_for: How many of its calls are not done yet.
        bell: Wakes its thread.
    """

    def __init__(
        self,
        forget: Callable[["Member"], None],
        *,
        alone: bool,
        key: Hashable,
        outputs: Sequence[int],
        present: list[bool] | None = None,
    ) -> None:
        """Made by :meth:`Rendezvous.member`."""
        self.alone = alone
        self.key = key
        self.outputs = tuple(outputs) if len(outputs) > 1 else (1,)
        self.present = [True] * len(outputs) if present is None else present
        self.kind: Any = None
        self.waits_for = 0
        self.bell = Bell()
        self._forget = forget
        self._forwards = self._shared = 0

    @property
    def batch_mean(self) -> float:
        """Mean number of requests that shared its forwards, its own included."""
        return self._shared / self._forwards if self._forwards else 1.0

    def leave(self) -> None:
        """Be waited for no longer; further calls run alone."""
        self.alone = True
        self._forget(self)

    def count(self, shared: int) -> None:
        """Note how many requests shared a forward of it."""
        self._forwards += 1
        self._shared += shared


Forward = Callable[..., Any]


class Call:
    """One call of a denoiser by one pipeline, and what became of it.

    Attributes:
        member: Whose it is.
        owners: The requests that have rows in it, by their numbers among those of the member.
        outputs: For each of them, how many outputs it has.
        requests: How many they are.
        layout: None where it must run alone.
        rows: Samples in it; 0 where it could not be told.
        row_counts: Those of each request; of all together where they are not alike.
        stats: What was learnt about its kind; calls with the same stats may share a forward.
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
        self.requests = self.shared = len(self.owners)
        self.layout: Layout | None = None
        self.rows = 0
        self.row_counts = [0]
        self.stats: BatchStats | None = None
        self.arrived = arrived
        self.output: Any = None
        self.error: BaseException | None = None

    def describe(self, names: Sequence[str]) -> None:
        """Find out its layout; `names` are those of the forward's arguments, in their order."""
        if len(self.args) > len(names):  # which the call itself will raise, in its turn
            return
        self.arguments = self.kwargs
        if self.args:
            self.arguments = dict(zip(names, self.args, strict=False)) | self.kwargs
        try:
            self.layout = layout(self.arguments)
        except Unmergeable as error:
            warn_once(error.name)
            return
        self.rows = self.layout.rows
        self.row_counts = [self.rows] if self.requests == 1 else self._row_counts()

    def _row_counts(self) -> list[int]:
        repeats, odd = divmod(self.rows, sum(self.outputs))
        return [self.rows] if odd else [repeats * outputs for outputs in self.outputs]

    def parts(self, size: int | None = None) -> "list[tuple[Call, list[int]]]":
        """Return it cut into calls of `size` requests, with the rows that each has of it.

        Without a size, into as large ones as are allowed. Rows of requests that left are in none.
        Empty where it is to run as it is.
        """
        if self.requests == 1 or self.stats is None or self.rows % sum(self.outputs):
            return []
        counts, present = self.row_counts, self.member.present
        here = [index for index, owner in enumerate(self.owners) if present[owner]]
        cut = []
        while here:
            most = size or self.stats.most([counts[index] for index in here])
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
        part.arguments, part.stats = arguments, self.stats
        part.layout = replace(self.layout, rows=len(places))
        part.owners = [self.owners[index] for index in indices]
        part.outputs = [self.outputs[index] for index in indices]
        part.requests = part.shared = len(part.owners)
        part.rows = part.layout.rows
        part.row_counts = part._row_counts()
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
