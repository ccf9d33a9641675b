"""Held calls: clients that wait for a request, or follow it, on an open connection.

A held call sleeps until the stream of changes wakes it; it never asks again and again. Their number
is bounded, so that calls that do not wait always find a thread. Does not know HTTP headers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from redis.exceptions import RedisError

from configs.errors import ServingError
from routing.changes import Changes, Subscription
from routing.record import Request
from routing.request_store import RequestStore

_AWAY_S: Final = (
    5.0  # the stream of changes wakes everybody when Redis is back; in case it does not
)


class TooManyWaits(ServingError):
    """Raised when as many calls are held already as this process may hold."""

    status: ClassVar[int] = 429
    code: ClassVar[str] = "too_many_waits"
    retryable: ClassVar[bool] = True


class HeldCalls:
    """The calls that this process holds."""

    def __init__(self, store: RequestStore, changes: Changes, limit: int) -> None:
        """Hold at most `limit` calls at a time."""
        self._store = store
        self._changes = changes
        self._limit = limit
        self._lock = threading.Lock()
        self._held: set[Subscription] = set()
        self._closed = False

    @property
    def count(self) -> int:
        """How many calls are held at this moment."""
        return len(self._held)

    def wait(self, request: Request, seconds: float) -> Request:
        """Return the request once it has ended, or as it stands after `seconds`, or when closing.

        Redis may go away and come back meanwhile; then it is the request as it was last known.

        Raises:
            TooManyWaits: The limit is reached.
            NotFound: The record was removed meanwhile.
        """
        deadline = time.monotonic() + seconds
        with self.hold(request.id, only_end=True) as subscription:
            while True:
                # Read after subscribing: an end between the two would otherwise be missed.
                pause_s = seconds
                try:
                    request = self._store.get(request.id)
                except RedisError:
                    pause_s = _AWAY_S
                left = deadline - time.monotonic()
                if request.is_terminal or left <= 0 or self._closed:
                    return request
                subscription.wait(min(left, pause_s))

    @property
    def closed(self) -> bool:
        """Whether held calls are to end now."""
        return self._closed

    def close(self) -> None:
        """Let every held call answer now, with the request as it stands; hold none from now on."""
        self._closed = True
        with self._lock:
            held = list(self._held)
        for subscription in held:
            subscription.notify()

    @contextmanager
    def hold(self, request_id: str, *, only_end: bool) -> Iterator[Subscription]:
        """Count as a held call that is woken by the changes of a request, or by its end only.

        Raises:
            TooManyWaits: The limit is reached.
        """
        with self._changes.subscribe(request_id, only_end=only_end) as subscription:
            with self._lock:
                if len(self._held) >= self._limit:
                    raise TooManyWaits(
                        f"This process already holds {self._limit} calls; poll the request "
                        "without `Prefer: wait` and events, or ask again later.",
                        retry_after=1.0,
                    )
                self._held.add(subscription)
            try:
                yield subscription
            finally:
                with self._lock:
                    self._held.remove(subscription)
