"""Which rows of a batch are whose: all outputs of the first request, then those of the next.

Knows no tensors.
"""

from collections.abc import Sequence
from itertools import accumulate

from workers.engine.seat import Seat


class OutputRows:
    """Rows of the outputs of several requests, one for each.

    Attributes:
        seats: The requests, in the order of their rows.
        total: Rows of all of them.
    """

    def __init__(self, seats: Sequence[Seat]) -> None:
        """Lay them out."""
        self.keep(seats)

    def keep(self, seats: Sequence[Seat]) -> None:
        """Lay out these only, for the others have no rows any more."""
        self.seats = tuple(seats)
        ends = list(accumulate(seat.outputs for seat in seats))
        self.total = ends[-1]
        self._rows = {
            seat: slice(end - seat.outputs, end) for seat, end in zip(seats, ends, strict=True)
        }

    def of(self, seat: Seat) -> slice:
        """Return the rows of one request."""
        return self._rows[seat]

    def of_all(self, seats: Sequence[Seat]) -> list[int]:
        """Return the rows of some of the requests."""
        return [row for seat in seats for row in range(self.total)[self._rows[seat]]]
