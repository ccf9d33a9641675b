"""The wish to stop: what Ctrl-C, SIGTERM and a closed terminal tell the launcher.

Does not know what is stopped.
"""

from __future__ import annotations

import signal
import threading


class StopWish:
    """Set by a first signal; a second one asks to hurry."""

    def __init__(self) -> None:
        """Take over the signals; a SIGHUP that was ignored (``nohup``) stays ignored."""
        self._event = threading.Event()
        self._times = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def wait(self, seconds: float) -> bool:
        """Wait for the first signal, but not longer than ``seconds``; whether it has come."""
        return self._event.wait(seconds)

    def has_come(self) -> bool:
        """Whether there was a signal."""
        return self._event.is_set()

    def hurries(self) -> bool:
        """Whether there was more than one."""
        return self._times > 1

    def _note(self, *_: object) -> None:
        self._times += 1
        self._event.set()
