"""The sender: one thread that does the sending of a process, for callers that wait only so long.

The library that sends has timeouts for single operations and locks around its connections, so how
long it takes where the broker hangs is the sum of other callers' waits too. Here a caller waits for
a time of its own, and what it handed over is sent when the broker lets it. Does not know what.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, Full, Queue
from typing import Final

_MOST: Final = 1000  # that wait to be sent: what is beyond is made good by the heartbeat
_LAST_S: Final = 1.0
_logger = logging.getLogger(__name__)

_Sending = tuple[Callable[[], bool], Future[bool]]


class Sender:
    """Does what it is handed, in order, in a thread that starts with the first of it."""

    def __init__(self) -> None:
        """Start nothing yet, so that a process may fork."""
        self._unsent: Queue[_Sending | None] = Queue(_MOST)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def hand_over(self, send: Callable[[], bool]) -> Future[bool]:
        """Have ``send`` called; return what it will return, or False where too much waits."""
        promised: Future[bool] = Future()
        try:
            self._unsent.put_nowait((send, promised))
        except Full:
            promised.set_result(False)
        with self._lock:
            # Not alive in a process that was forked from one where it was.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="sender", daemon=True)
                self._thread.start()
        return promised

    def close(self) -> None:
        """Give up what waits to be sent, and end once what is being sent is."""
        try:
            while True:
                self._unsent.get_nowait()
        except Empty:
            pass
        self._unsent.put(None)
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _work(self) -> None:
        while (each := self._unsent.get()) is not None:
            send, promised = each
            try:
                promised.set_result(send())
            except Exception as error:
                _logger.exception("something could not be sent")
                promised.set_exception(error)
