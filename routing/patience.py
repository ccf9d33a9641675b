"""Patience: the seconds that one call may wait for Redis, in all that it asks of it.

Timeouts of single operations add up: one for each address to connect to, each line of the
handshake, each command, each try again. So a call of the door is given one amount, and every
operation of its thread draws on it what it took (``patient_connection``): once it is spent, the
next one fails at once. Only waiting counts: a slow upload or a large picture costs nothing of it.

A thread without patience, such as the sweep's, has the timeouts of its operations alone. Does not
know what is waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Patience:
    """What is left of the seconds that a call may wait.

    Attributes:
        left_s: Seconds; 0 once they are spent.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with ``seconds``."""
        self._all_s = seconds
        self._clock = clock
        self.left_s = seconds

    def renew(self) -> None:
        """Begin again: the call has been held meanwhile, and nobody expects its answer in time."""
        self.left_s = self._all_s

    @contextmanager
    def granted(self, wanted_s: float | None) -> Iterator[float]:
        """Grant an operation up to ``wanted_s`` (None: no limit of its own), and draw what it took.

        Raises:
            TimeoutError: Nothing is left.
        """
        if self.left_s <= 0:
            raise TimeoutError("the call has waited for Redis as long as it may")
        seconds = self.left_s if wanted_s is None else min(wanted_s, self.left_s)
        started = self._clock()
        try:
            yield seconds
        finally:
            self.left_s = max(0.0, self.left_s - (self._clock() - started))


_threads = threading.local()


def begin_patience(seconds: float) -> None:
    """Give the call that this thread begins its patience."""
    _threads.patience = Patience(seconds)


def end_patience() -> None:
    """The call of this thread is over."""
    _threads.patience = None


def renew_patience() -> None:
    """Renew the patience of this thread's call, if it has one."""
    patience = _of_this_thread()
    if patience is not None:
        patience.renew()


@contextmanager
def granted(wanted_s: float | None) -> Iterator[float | None]:
    """Grant an operation of this thread as :meth:`Patience.granted`; all it wants without one.

    Raises:
        TimeoutError: Nothing is left.
    """
    patience = _of_this_thread()
    if patience is None or wanted_s == 0:  # what does not wait takes nothing
        yield wanted_s
        return
    with patience.granted(wanted_s) as seconds:
        yield seconds


def _of_this_thread() -> Patience | None:
    patience: Patience | None = getattr(_threads, "patience", None)
    return patience
