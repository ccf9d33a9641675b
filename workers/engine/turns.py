"""The turn to use what requests share outside their denoising loops: one at a time, first come.

Text encoders, tokenizers and autoencoders keep state between calls, and the peak of memory is that
of one. Who waits to begin may be taken along by one of its kind whose turn it is, so that they
become one pipeline call. Knows no pipelines.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from workers.engine.seat import Seat

_POLL_S = 0.1


class _Ticket:
    def __init__(self, seat: Seat | None) -> None:
        self.seat = seat
        self.called = threading.Event()
        self.taken_along = False


class Turns:
    """Belongs to one engine; a turn belongs to a run, not to a thread.

    Attributes:
        patience_s: Longest that one whose turn it is waits for those that are about to come.
        most_outputs: Of those that start together. Each is a text to encode at once, and attention
            of a text encoder takes a hundred megabytes for one (T5-XXL, 512 tokens).
    """

    def __init__(self) -> None:
        """The turn is free."""
        self.patience_s = 0.005
        self.most_outputs = 16
        self._lock = threading.Lock()
        self._taken = False
        self._line: deque[_Ticket] = deque()
        self._coming = 0
        self._nobody_comes = threading.Condition(self._lock)
        self._thread = threading.local()

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Say that this thread may be about to bring a request; it has come or not at the end."""
        with self._lock:
            self._coming += 1
            self._thread.is_coming = True
        try:
            yield
        finally:
            with self._lock:
                self._has_come()

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._line)

    def begin(self, seat: Seat) -> Sequence[Seat]:
        """Wait for the turn of `seat`; return whom it starts with, itself first.

        Empty where another has taken it along and works for it. It tells its observer every tenth
        of a second while it waits; raises what that raises.
        """
        steps = seat.parameters.num_inference_steps
        ticket = self._wait(lambda: seat.tell(0, steps), seat)
        if ticket.taken_along:
            return ()
        company = [seat]
        with self._lock:
            if seat.company is not None:
                self._nobody_comes.wait_for(lambda: not self._coming, self.patience_s)
                for ticket in [each for each in self._line if _fits(each, seat)]:
                    if ticket.seat is None or not self._has_room(company, ticket.seat):
                        continue
                    self._line.remove(ticket)
                    ticket.taken_along = True
                    ticket.called.set()
                    company.append(ticket.seat)
        return company

    def _has_room(self, company: Sequence[Seat], seat: Seat) -> bool:
        return sum(each.outputs for each in (*company, seat)) <= self.most_outputs

    def take(self, tell: Callable[[], None]) -> None:
        """Wait for the turn; `tell` is called every tenth of a second and may raise."""
        self._wait(tell, None)

    def pass_on(self) -> None:
        """Give the turn to whoever waits first; called by the run that has it."""
        with self._lock:
            if self._line:
                self._line.popleft().called.set()
            else:
                self._taken = False

    def _wait(self, tell: Callable[[], None], seat: Seat | None) -> _Ticket:
        ticket = _Ticket(seat)
        with self._lock:
            self._has_come()
            if not self._taken:
                self._taken = True
                return ticket
            self._line.append(ticket)
        try:
            while not ticket.called.wait(_POLL_S):
                tell()
        except BaseException as error:
            self._withdraw(ticket, error)
            raise
        return ticket

    def _has_come(self) -> None:
        if getattr(self._thread, "is_coming", False):
            self._thread.is_coming = False
            self._coming -= 1
            if not self._coming:
                self._nobody_comes.notify_all()

    def _withdraw(self, ticket: _Ticket, error: BaseException) -> None:
        with self._lock:
            waits = ticket in self._line
            if waits:
                self._line.remove(ticket)
        if ticket.taken_along and ticket.seat is not None:
            ticket.seat.end(error=error)
        elif not waits:
            self.pass_on()


def _fits(ticket: _Ticket, seat: Seat) -> bool:
    return ticket.seat is not None and ticket.seat.company == seat.company
