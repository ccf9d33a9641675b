"""What was learnt about merging calls of one signature: whether it is right, how far it pays.

Times are of whole forwards, by their number of rows; memory is that of the device. Knows no tensors
and no clock.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median_low

_KEPT = 9
_ENOUGH = 5
# Smaller differences are noise of a busy machine.
_CLEARLY = 1.03
_RETRY_AFTER = 200
# Of the memory that is free, the rest is for encoders, autoencoders and fragments.
_USABLE = 0.8


class BatchLesson:
    """One signature's; the rendezvous asks it how many rows may go together.

    Attributes:
        proven: Whether a merged forward gave what its parts gave alone; None before the first.
    """

    def __init__(self) -> None:
        """Nothing is known: any number of rows is allowed."""
        self.proven: bool | None = None
        self._cap: int | None = None
        self._since_cap = 0
        self._row_bytes: float | None = None
        self._fitting: int | None = None
        self._seconds: dict[int, deque[float]] = {}

    def allows(self, rows: int) -> bool:
        """Tell whether so many rows of several calls may go together."""
        if self.proven is False or (self._cap is not None and rows > self._cap):
            return False
        return self._fitting is None or rows <= self._fitting

    def most(self, rows: int, requests: int) -> int:
        """Return how many of these requests with so many rows each may go together; at least 1.

        Before anything is proven it is one, so that the first forward of several is one that the
        rendezvous merges and proves.
        """
        if self.proven is None:
            return 1
        fitting = (count for count in range(requests, 1, -1) if self.allows(count * rows))
        return next(fitting, 1)

    def step_s(self, rows: int) -> float | None:
        """Return what a forward of so many rows takes, in seconds; None if it never ran."""
        times = self._seconds.get(rows)
        return median_low(times) if times else None

    def note(self, rows: Sequence[int], seconds: float) -> None:
        """Learn what a forward of calls with so many rows took.

        A size that is clearly slower than its parts, five times measured, is not tried again for
        two hundred forwards.
        """
        times = self._seconds.setdefault(sum(rows), deque(maxlen=_KEPT))
        times.append(seconds)
        if len(rows) > 1 and len(times) >= _ENOUGH and self._is_slower(rows):
            self.limit(rows)
        elif self._cap is not None:
            self._since_cap += 1
            if self._since_cap >= _RETRY_AFTER:
                for size in [size for size in self._seconds if size > self._cap]:
                    del self._seconds[size]
                self._cap = None

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
        """Keep later forwards smaller than these calls together, for a while."""
        self._cap = sum(rows) - max(rows)
        self._since_cap = 0

    def _is_slower(self, rows: Sequence[int]) -> bool:
        parts = [self.step_s(each) for each in rows]
        whole = self.step_s(sum(rows))
        known = [each for each in parts if each is not None]
        return whole is not None and len(known) == len(rows) and whole > _CLEARLY * sum(known)
