"""What was measured of merged calls of one kind: whether merging is right, how far it pays."""

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

_KEPT = 9


_ENOUGH = 5


# Smaller differences are not worth a smaller batch.
_CLEARLY = 1.03


# Forwards until a size is tried or weighed again.
_REST = 200


# Of the memory that is free, the rest is for encoders, autoencoders and fragments.
_USABLE = 0.8


class BatchStats:
    """One signature's; the rendezvous asks it how many rows may go together.

    Attributes:
        right: Whether a merged forward gave what its parts gave alone; None before the first.
        pads: The same of one for which texts were made longer.
        shown: Where the calls of checked forwards differed (``workers.sharing.checks``); of
            those for which texts were made longer by themselves, under True.
    """

    def __init__(self) -> None:
        """Nothing is known: any number of rows is allowed."""
        self.right: bool | None = None
        self.pads: bool | None = None
        self.shown: dict[bool, set[tuple[str, int]]] = {False: set(), True: set()}
        self._cap: int | None = None
        self._rest = 0
        self._weighed: list[float] = []
        self._row_bytes: float | None = None
        self._fitting: int | None = None
        self._seconds: dict[int, deque[float]] = {}

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

    def note(self, rows: Sequence[int], seconds: float) -> None:
        """Learn what a forward of requests with so many rows took."""
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

    def note_memory(self, rows: int, peak_bytes: int | None, free_bytes: int | None) -> None:
        """Learn what a forward of so many rows took at most, and what the next may take.

        A forward has a part that does not grow with its rows, so a large one tells more than a
        small one of what a row needs.
        """
        if peak_bytes is None or free_bytes is None or rows < 1:
            return
        needed = peak_bytes / rows
        self._row_bytes = needed if self._row_bytes is None else min(self._row_bytes, needed)
        self._fitting = int(_USABLE * free_bytes / max(self._row_bytes, 1.0))

    def limit(self, rows: Sequence[int]) -> None:
        """Keep later forwards smaller than these requests together, for a while."""
        self._cap = sum(rows) - max(rows)
        self._rest = _REST
