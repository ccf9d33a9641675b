"""One child process: started, watched, restarted after a pause, ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


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


_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


class ChildProcess:
    """A running command, and whatever it starts itself.

    A session of its own keeps a Ctrl-C in the terminal from reaching it: only the launcher hears
    that, and stops its parts in order. On Linux the kernel sends it ``orphan_signal`` when the
    launcher dies, however that happens; to the kernel, the launcher is the thread that started it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        orphan_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        """Start ``command`` in ``folder``, its output added to the file ``log``.

        Raises:
            OSError: The command cannot be started, or the log cannot be written.
        """
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Safe here: the launcher has one thread, and what runs takes no lock.
                preexec_fn=_tie_to_parent(orphan_signal, os.getpid()),  # noqa: PLW1509
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs.

        With the process ends what is left of its group: children of a killed server would go on
        holding its port.
        """
        if self._process.returncode is None and self._has_ended():
            self.kill()
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM); it passes that on to its own children."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """End the process and its whole group at once (SIGKILL)."""
        # Not after it was reaped: its number may belong to somebody else by then.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _has_ended(self) -> bool:
        """Whether it has ended; it stays unreaped, so that its group's number stays its own."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _tie_to_parent(orphan_signal: signal.Signals, parent: int) -> Callable[[], None] | None:
    if _LIBC is None:
        return None
    prctl = _LIBC.prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(orphan_signal), 0, 0, 0)
        if os.getppid() != parent:  # the launcher died before the line above
            os._exit(1)

    return tie
