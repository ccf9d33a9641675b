"""Submits whose answer from Redis got lost: whether they were recorded is not known.

Their clients were told that the service is away, so nobody asks for what may have been recorded.
Does not know how it is withdrawn (``router``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_OLD_S: Final = 120.0  # a command may reach Redis late: when it goes on, or by a slow network
_MOST: Final = 10_000


@dataclass(frozen=True, slots=True)
class LostSubmit:
    """One submit: its id, whether its client can find it by a key, whether to give it up."""

    id: str
    has_key: bool
    is_old: bool


class Unanswered:
    """The lost submits of this process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Take the time from ``clock``."""
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, bool]] = {}

    def add(self, request_id: str, *, has_key: bool) -> None:
        """Remember a submit; the oldest is forgotten where there are too many."""
        with self._lock:
            self._known[request_id] = (self._clock(), has_key)
            while len(self._known) > _MOST:
                del self._known[next(iter(self._known))]

    def discard(self, request_id: str) -> None:
        """Forget a submit."""
        with self._lock:
            self._known.pop(request_id, None)

    def renew(self) -> None:
        """Take them all for new: Redis was away, and gets to what it was sent when it is back."""
        with self._lock:
            now = self._clock()
            self._known = {each: (now, has_key) for each, (_, has_key) in self._known.items()}

    def all(self) -> list[LostSubmit]:
        """Return those that may have been recorded; an old one will not be any more."""
        with self._lock:
            oldest = self._clock() - _OLD_S
            return [
                LostSubmit(request_id, has_key, since < oldest)
                for request_id, (since, has_key) in self._known.items()
            ]
