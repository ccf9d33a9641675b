"""Ranks forked from a process that has imported torch and diffusers, as the tests' replicas are.

Those of tests/e2e are started by the command line.
"""

import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, wait

import psutil

from tests.e2e.preloaded import FORKS
from workers.devices import rank


class ForkedRank:
    """One rank, with the part of subprocess.Popen that its replica uses."""

    def __init__(self, pipe: Connection) -> None:
        self._process = FORKS.Process(target=_be_a_rank, args=(pipe,), daemon=True)
        self._process.start()
        self._reading = threading.Lock()
        _started.append(self)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with self._reading:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired."""
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


_started: list[ForkedRank] = []


def ranks() -> list[psutil.Process]:
    """Return the ranks that live."""
    _started[:] = [each for each in _started if each.poll() is None]
    return [psutil.Process(each.pid) for each in _started]


def _be_a_rank(pipe: Connection) -> None:
    sys.argv = ["rank", str(pipe.fileno()), str(os.getppid())]
    rank.main()
