"""The processes of a replica's other ranks: started, told, heard, watched and ended.

One that ends before it is told to is a fault that can not be mended: it is told to whoever watches,
and everything here raises it from then on. Does not know denoisers, nor what a call is.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from configs.errors import DeviceLost, ModelLoadFailed
from workers.devices.rank_messages import END, UNDONE, VERDICT_S, Failed, Start, receive, send

_logger = logging.getLogger(__name__)

_REPOSITORY = Path(__file__).parents[2]
_END_S = 2.0
# Seconds in which the end of a rank is noticed once a pipe or a collective has failed by it.
_NOTICE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Child:
    """One rank, and this side of its pipe."""

    process: subprocess.Popen[bytes]
    pipe: Connection


class RankProcesses:
    """Ranks 1 and up of this process, which is rank 0.

    Attributes:
        fault: Why they can work no more; None while they can.
    """

    def __init__(self, model: str, world_size: int) -> None:
        """Start nothing yet."""
        self.fault: str | None = None
        self._model = model
        self._world_size = world_size
        self._children: dict[int, _Child] = {}
        self._closing = False
        self._faulty = threading.Event()
        self._on_fault: Callable[[str], None] = lambda _: None

    def start(self, first: Start) -> None:
        """Start one and tell it that; it ends when the thread that calls this ends."""
        ours, theirs = Pipe()
        process = subprocess.Popen(  # noqa: S603 - this interpreter, this module
            [sys.executable, "-m", "workers.devices.rank", str(theirs.fileno()), str(os.getpid())],
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._children[first.rank] = _Child(process, ours)
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its silence will tell
            send(ours, first)

    def await_all(self, expected: str) -> None:
        """Wait until each rank has said that; a model may take any time to load.

        Raises:
            ModelLoadFailed: One says something else, or has ended.
        """
        for rank, child in self._children.items():
            try:
                said = receive(child.pipe)
            except (EOFError, OSError):
                code = child.process.wait()
                said = Failed(f"it ended with exit code {code}; the replica's log has more")
            if said != expected:
                cause = said.cause if isinstance(said, Failed) else said
                who = f"{self._model}: rank {rank} of {self._world_size}"
                raise ModelLoadFailed(f"{who} could not start: {cause}")

    def watch_ends(self) -> None:
        """Notice the end of a rank from here on."""
        for rank, child in self._children.items():
            threading.Thread(
                target=self._watch, args=(rank, child.process), name=f"rank{rank}", daemon=True
            ).start()

    def watch(self, on_fault: Callable[[str], None]) -> None:
        """Call `on_fault` with the reason, in a thread, once the ranks can work no more."""
        self._on_fault = on_fault
        if self.fault is not None:
            on_fault(self.fault)

    def tell(self, message: Any, ranks: Iterable[int] | None = None) -> None:
        """Send a message to some ranks, or to all; raises DeviceLost where one has ended."""
        for rank in self._children if ranks is None else ranks:
            try:
                send(self._children[rank].pipe, message)
            except OSError:
                self._lose(rank)

    def answers(self, ranks: Iterable[int]) -> dict[int, Any]:
        """Wait for a message of each of some ranks, which work on one thing together.

        Once one of them has failed, the others have little time left: they may wait for it.

        Raises:
            DeviceLost: One has ended, or hangs.
        """
        waiting = {self._children[rank].pipe: rank for rank in ranks}
        heard: dict[int, Any] = {}
        limit_s: float | None = None
        while waiting:
            ready = wait(list(waiting), limit_s)
            if not ready:
                self.fail(f"rank {min(waiting.values())} is still in a call that has failed")
                self.check()
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                heard[rank] = self._receive(rank)
                if isinstance(heard[rank], Failed):
                    limit_s = VERDICT_S
        return heard

    def undo(self, ranks: Sequence[int]) -> None:
        """After a call that has failed in these ranks: make sure that none is in it any more.

        Raises:
            DeviceLost: One is, or has ended.
        """
        if self._faulty.wait(_NOTICE_S if self._ended() else 0):
            self.check()
        self.tell(UNDONE, ranks)
        for rank in ranks:
            if not self._children[rank].pipe.poll(VERDICT_S) or self._receive(rank) != UNDONE:
                self.fail(f"rank {rank} is still in a call that has failed")
        self.check()

    def check(self) -> None:
        """Raise DeviceLost where the ranks can work no more."""
        if self.fault is not None:
            raise DeviceLost(self.fault)

    def fail(self, why: str) -> None:
        """Note that the ranks can work no more, and tell it."""
        if self.fault is None:
            self.fault = why
            self._faulty.set()
            _logger.critical("%s; the replica can not go on", why)
            self._on_fault(why)

    def close(self) -> None:
        """End all ranks."""
        self._closing = True
        for child in self._children.values():
            try:
                send(child.pipe, END)
            except OSError:
                _logger.debug("a rank had ended before it was told to")
        for child in self._children.values():
            try:
                child.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.pipe.close()

    def _receive(self, rank: int) -> Any:
        try:
            return receive(self._children[rank].pipe)
        except (EOFError, OSError):
            self._lose(rank)

    def _lose(self, rank: int) -> NoReturn:
        self._faulty.wait(_NOTICE_S)
        self.fail(f"rank {rank} of {self._world_size} does not answer any more")
        raise DeviceLost(self.fault or "")

    def _ended(self) -> bool:
        return any(child.process.poll() is not None for child in self._children.values())

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self.fail(f"rank {rank} of {self._world_size} {how}")
