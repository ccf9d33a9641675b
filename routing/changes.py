"""Changes: waiting for a record to change without asking again and again.

One thread in each process reads the stream of changes and wakes whoever waits for the request at
hand, so any number of waiting clients costs one connection to Redis and no polling. A waiter always
reads the record itself after it subscribed: the stream only says when to look.

Does not know HTTP, nor what a change means.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from routing.connection import BLOCK_S
from routing.keys import Keys
from routing.record import TERMINAL

_PAUSE_S = 0.5
_logger = logging.getLogger(__name__)


class Subscription:
    """One waiter's view of one request."""

    def __init__(self, *, only_end: bool) -> None:
        """Wake at the end only, or at every change."""
        self.only_end = only_end
        self._changed = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Block until the request changed since the last call; False if it did not in time."""
        changed = self._changed.wait(max(0.0, timeout_s))
        self._changed.clear()
        return changed

    def notify(self) -> None:
        """Wake the waiter."""
        self._changed.set()


class Changes:
    """The one reader of the stream in this process."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        """Read nothing before :meth:`start`."""
        self._redis = redis
        self._stream = Keys(prefix).changes
        self._lock = threading.Lock()
        self._waiters: defaultdict[str, list[Subscription]] = defaultdict(list)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start reading, once; threads do not outlive a fork, so each process calls it itself."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="changes", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop reading; returns once the thread has ended."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * BLOCK_S + _PAUSE_S)

    @contextmanager
    def subscribe(self, request_id: str, *, only_end: bool = False) -> Iterator[Subscription]:
        """Be woken by changes of a request, as long as the context lasts."""
        subscription = Subscription(only_end=only_end)
        with self._lock:
            self._waiters[request_id].append(subscription)
        try:
            yield subscription
        finally:
            with self._lock:
                self._waiters[request_id].remove(subscription)
                if not self._waiters[request_id]:
                    del self._waiters[request_id]

    def _read(self) -> None:
        last: str | None = None
        while not self._stopped.is_set():
            try:
                if last is None:
                    last = self._newest()
                    # Whatever happened while nobody read is caught up with by looking at the
                    # records.
                    self._notify(lambda _id, _subscription: True)
                answer: Any = self._redis.xread(
                    {self._stream: last}, count=1000, block=int(BLOCK_S * 1000)
                )
                for _stream, entries in answer or []:
                    for entry_id, entry in entries:
                        last = entry_id
                        self._deliver(entry)
            except RedisError as error:
                _logger.warning("the stream of changes can not be read: %s", error)
                last = None
                self._stopped.wait(_PAUSE_S)

    def _newest(self) -> str:
        entries: Any = self._redis.xrevrange(self._stream, count=1)
        return str(entries[0][0]) if entries else "0-0"

    def _deliver(self, entry: dict[str, str]) -> None:
        ended = entry["status"] in TERMINAL
        self._notify(
            lambda waiting, waiter: waiting == entry["id"] and (ended or not waiter.only_end)
        )

    def _notify(self, concerned: Callable[[str, Subscription], bool]) -> None:
        with self._lock:
            for request_id, waiters in self._waiters.items():
                for waiter in waiters:
                    if concerned(request_id, waiter):
                        waiter.notify()
