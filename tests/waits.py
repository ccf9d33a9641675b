"""What a thread waits for: the seconds of its blocking calls, each counted up to its own timeout.

So a machine that is busy with other things does not count: a receive with a timeout of one second
that returned after three waited for one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_BLOCKING: Final = frozenset(
    {"connect", "recv", "recv_into", "send", "sendall", "do_handshake", "getaddrinfo"}
    | {"acquire", "sleep", "select", "poll"}
)
_FRAMES: Final = 3  # from the lock by way of Condition.wait and Event.wait


class Waits:
    """The blocking calls of a thread.

    Attributes:
        seconds: What they took, or the timeouts of those that overran them.
        endless: Names of those that had no timeout.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.endless: list[str] = []
        self._begun: list[tuple[float, float | None]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take part as the profile function of a thread."""
        if not event.startswith("c_") or argument.__name__ not in _BLOCKING:
            return
        if event == "c_call":
            self._begun.append((time.monotonic(), self._granted(frame, argument)))
        elif self._begun:
            started, granted = self._begun.pop()
            took = time.monotonic() - started
            self.seconds += took if granted is None else min(took, granted)

    def _granted(self, frame: FrameType, function: Any) -> float | None:
        if function.__name__ == "acquire":
            return 0.0 if _starts_a_thread(frame) else frame.f_locals.get("timeout")
        owner = function.__self__
        if not hasattr(owner, "gettimeout"):
            return None
        granted: float | None = owner.gettimeout()
        if granted is None:
            self.endless.append(function.__name__)
        return granted


def _starts_a_thread(frame: FrameType | None) -> bool:
    """Whether it waits for a thread that it has just started: that is up to the machine."""
    for _ in range(_FRAMES):
        if frame is not None and frame.f_code is threading.Thread.start.__code__:
            return True
        frame = frame.f_back if frame is not None else None
    return False


@contextmanager
def counted_waits() -> Iterator[Waits]:
    """Count what this thread waits for meanwhile."""
    waits = Waits()
    sys.setprofile(waits)
    try:
        yield waits
    finally:
        sys.setprofile(None)
