"""How long to wait before starting again what has ended: 1 s, 2 s, 4 s … 60 s.

Does not know clocks, nor what is started.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Backoff:
    """The pauses between the starts of one part.

    Attributes:
        first_s: The pause after the first end.
        cap_s: The longest pause.
        stable_s: A part that was ready for this long has proven itself: the pauses begin anew.
    """

    first_s: float = 1.0
    cap_s: float = 60.0
    stable_s: float = 60.0
    _next_s: float = field(default=0.0, init=False)

    def pause(self, ready_s: float) -> float:
        """Return the pause, in seconds, after an end; the part had been ready for ``ready_s``."""
        if self._next_s == 0.0 or ready_s >= self.stable_s:
            self._next_s = self.first_s
        pause = min(self._next_s, self.cap_s)
        self._next_s = pause * 2
        return pause
