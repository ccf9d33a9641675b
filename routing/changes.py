"""Changes: waiting for a record to change, and what it changed to, without asking again and again.

One thread in each process reads the stream of changes and hands each one to whoever waits for the
request at hand, so any number of waiting clients costs one connection to Redis and no polling. The
record stays the truth: a waiter reads it after it subscribed, and again where changes were missed.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from configs.settings import Settings
from routing.connection import BLOCK_S, renew_patience
from routing.keys import Keys
from routing.request import TERMINAL

_PAUSE_S = 0.5
_KEPT = 1000  # changes that a slow waiter may be behind
_AT_ONCE = 1000
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one record.

    Attributes:
        cursor: Its place in the stream; later ones are greater as pairs of numbers.
        event: ``queued``, ``started``, ``progress``, ``preview``, ``edited``, ``canceling`` or the
            terminal status it ended with.
        status: The record's from then on.
        data: What belongs to the event, as text: ``replica``; ``step``, ``steps``, ``step_s``.
    """

    cursor: str
    request_id: str
    event: str
    status: str
    attempt: int
    data: Mapping[str, str]

    @property
    def is_end(self) -> bool:
        """Whether the request ended by it."""
        return self.status in TERMINAL

    @classmethod
    def from_entry(cls, cursor: str, entry: Mapping[str, str]) -> Self:
        """Read an entry of the stream."""
        rest = dict(entry)
        status = rest.pop("status")
        return cls(
            cursor=cursor,
            request_id=rest.pop("id"),
            event=rest.pop("event", status),
            status=status,
            attempt=int(rest.pop("attempt")),
            data=rest,
        )


class Subscription:
    """One waiter's view of one request."""

    def __init__(self, *, only_end: bool) -> None:
        """Wake at the end only, or at every change."""
        self.only_end = only_end
        self._changed = threading.Event()
        self._changes: deque[Change | None] = deque(maxlen=_KEPT)

    def wait(self, timeout_s: float) -> bool:
        """Block until the request changed since the last call; False if it did not in time.

        The call that waits here is held, and has its patience with Redis anew after that.
        """
        changed = self._changed.wait(max(0.0, timeout_s))
        self._changed.clear()
        renew_patience()
        return changed

    def take(self) -> list[Change] | None:
        """Return the changes since the last call, in order; None where some were missed."""
        taken = []
        complete = len(self._changes) < _KEPT
        while self._changes:
            change = self._changes.popleft()
            complete = complete and change is not None
            if change is not None:
                taken.append(change)
        return taken if complete else None

    def notify(self, change: Change | None = None) -> None:
        """Wake the waiter by a change; without one by the news that some may have been missed."""
        self._changes.append(change)
        self._changed.set()


class Changes:
    """The one reader of the stream in this process."""

    def __init__(self, settings: Settings, redis: Redis) -> None:
        """Read nothing before :meth:`start`; ``redis`` may block for ``BLOCK_S``."""
        self._redis = redis
        self._stream = Keys(settings.redis_prefix).changes()
        self._lock = threading.Lock()
        self._waiters: defaultdict[str, list[Subscription]] = defaultdict(list)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._client_id: int | None = None

    def start(self) -> None:
        """Start reading, once; threads do not outlive a fork, so each process calls it itself."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="changes", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop reading; returns once the thread has ended."""
        self._stopped.set()
        if self._thread is None:
            return
        if self._client_id is not None:
            with suppress(RedisError):  # its read then ends by itself, after ``BLOCK_S``
                self._redis.client_unblock(self._client_id)
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

    def newest(self) -> str:
        """Return the cursor of the newest change of any record.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        entries: Any = self._redis.xrevrange(self._stream, count=1)
        return str(entries[0][0]) if entries else "0-0"

    def since(self, request_id: str, cursor: str) -> list[Change] | None:
        """Return a request's changes after ``cursor``; None where the stream begins later.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        oldest: Any = self._redis.xrange(self._stream, count=1)
        if not oldest or cursor_order(str(oldest[0][0])) > cursor_order(cursor):
            return None
        found: list[Change] = []
        while True:
            page: Any = self._redis.xrange(self._stream, f"({cursor}", count=_AT_ONCE)
            found += [Change.from_entry(*each) for each in page if each[1]["id"] == request_id]
            if len(page) < _AT_ONCE:
                return found
            cursor = page[-1][0]

    def _read(self) -> None:
        while not self._stopped.is_set():
            try:
                # One connection, whose number is known to who wants to end a read that blocks.
                with self._redis.client() as redis:  # type: ignore[no-untyped-call]
                    with suppress(ResponseError):  # not every user of a Redis may ask
                        self._client_id = int(redis.client_id())
                    self._follow(redis, self.newest())
            except RedisError as error:
                _logger.warning("the stream of changes cannot be read: %s", error)
                self._stopped.wait(_PAUSE_S)

    def _follow(self, redis: Redis, last: str) -> None:
        # Whatever happened while nobody read is caught up with by looking at the records.
        self._notify_all()
        while not self._stopped.is_set():
            answer: Any = redis.xread(
                {self._stream: last}, count=_AT_ONCE, block=int(BLOCK_S * 1000)
            )
            for _stream, entries in answer or []:
                for entry_id, entry in entries:
                    last = entry_id
                    if entry["id"] in self._waiters:
                        self._deliver(Change.from_entry(entry_id, entry))

    def _deliver(self, change: Change) -> None:
        with self._lock:
            for waiter in self._waiters.get(change.request_id, ()):
                if change.is_end or not waiter.only_end:
                    waiter.notify(change)

    def _notify_all(self) -> None:
        with self._lock:
            for waiters in self._waiters.values():
                for waiter in waiters:
                    waiter.notify()


def cursor_order(cursor: str) -> tuple[int, int]:
    """Return what orders cursors as the stream does."""
    moment, _, number = cursor.partition("-")
    return int(moment), int(number or 0)
