"""One rank as a child of this process, and this side of the pipe to it.

Knows how it is started, heard and ended; not what is said.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from workers.devices.rank_messages import Failed, Start, receive, send

_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class RankChild:
    """The process, and the pipe whose other end it holds."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _last_words: list[str] = field(default_factory=list)

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

    def hear(self) -> Any:
        """Return the message that has come, or wait for it; raises EOFError or OSError."""
        with self._reading:
            return receive(self.pipe)

    def how_ended(self) -> str:
        """Wait for its end; returns how it ended, and why where it has said so."""
        code = self.process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        with contextlib.suppress(EOFError, OSError), self._reading:
            while self.pipe.poll():
                said = receive(self.pipe)
                if isinstance(said, Failed):
                    self._last_words.append(said.cause)
        return ": ".join((how, *self._last_words[:1]))

    def end(self, deadline: float) -> None:
        """Wait for its end until then, by the monotonic clock; after that it is killed."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pipe.close()
