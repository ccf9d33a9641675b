"""One rank as a child of this process, and this side of the pipe to it.

Knows how it is started, heard and ended; not what is said.
"""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from workers.devices.rank_messages import Start, send

_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class RankChild:
    """The process, and the pipe whose other end it holds."""

    process: subprocess.Popen[bytes]
    pipe: Connection

    @classmethod
    def start(cls, first: Start) -> Self:
        """Start one and tell it that; it ends when the thread that calls this ends."""
        ours, theirs = Pipe()
        process = subprocess.Popen(  # noqa: S603 - this interpreter, this module
            [sys.executable, "-m", "workers.devices.rank", str(theirs.fileno()), str(os.getpid())],
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its silence will tell
            send(ours, first)
        return cls(process, ours)

    @property
    def has_ended(self) -> bool:
        """Whether the process is there no more."""
        return self.process.poll() is not None

    def end(self, deadline: float) -> None:
        """Wait for its end until then, by the monotonic clock; after that it is killed."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pipe.close()
