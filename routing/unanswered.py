"""Submits whose answer from Redis got lost: whether they were recorded is not known.

Their clients were told that the service is away, so nobody asks for what may have been recorded.
Does not know how it is withdrawn (``router``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_KEPT_S: Final = 120.0  # a command may reach Redis late: when it goes on, or by a slow network
_MOST: Final = 10_000


class Unanswered:
    """Ids, each kept for two minutes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Take the time from ``clock``."""
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}

    def add(self, request_id: str) -> None:
        """Keep an id; the oldest goes where there are too many."""
        with self._lock:
            self._since[request_id] = self._clock()
            while len(self._since) > _MOST:
                del self._since[next(iter(self._since))]

    def discard(self, request_id: str) -> None:
        """Forget an id: it was found and withdrawn."""
        with self._lock:
            self._since.pop(request_id, None)

    def ids(self) -> list[str]:
        """Return those that may still turn up, and forget the others."""
        with self._lock:
            oldest = self._clock() - _KEPT_S
            for request_id in [each for each, since in self._since.items() if since < oldest]:
                del self._since[request_id]
            return list(self._since)
