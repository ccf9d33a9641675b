"""The processes of a replica's other ranks: started, told, heard, watched and ended."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Self

from configs.errors import DeviceLost, ModelLoadFailed
from workers.devices.rank_messages import END, UNDO_S, UNDONE, Failed, Start, receive, send

_logger = logging.getLogger(__name__)


_REPOSITORY = Path(__file__).parents[2]


def start_process(pipe: Connection) -> subprocess.Popen[bytes]:
    """Start a rank that holds the pipe; it ends when the thread that calls this ends."""
    return subprocess.Popen(  # noqa: S603 - this interpreter, this module
        [sys.executable, "-m", "workers.devices.rank", str(pipe.fileno()), str(os.getpid())],
        cwd=_REPOSITORY,
        stdin=subprocess.DEVNULL,
        pass_fds=[pipe.fileno()],
    )


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
        process = start_process(theirs)
        theirs.close()
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its silence will tell
            send(ours, first)
        return cls(process, ours)

    @property
    def has_ended(self) -> bool:
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


# Seconds in which ranks let their devices go, before they are killed.
_END_S = 5.0


# Seconds in which the end of a rank is noticed once a pipe or a collective has failed by it.
_NOTICE_S = 2.0


class RankProcesses:
    """Ranks 1 and up of this process, which is rank 0.

    Attributes:
        fault: Why they can work no more; None while they can.
    """

    def __init__(self, model: str, world_size: int, timeout_s: float) -> None:
        """Start nothing yet; one that is silent for `timeout_s` where it should answer hangs."""
        self.fault: str | None = None
        self._model = model
        self._world_size = world_size
        # Where it waits for another one in a collective it is that one that hangs.
        self._timeout_s = timeout_s + UNDO_S
        self._children: dict[int, RankChild] = {}
        self._closing = False
        self._faulty = threading.Event()
        self._on_fault: Callable[[str], None] = lambda _: None

    def start(self, first: Start) -> None:
        """Start one and tell it that; it ends when the thread that calls this ends."""
        self._children[first.rank] = RankChild.start(first)

    def await_all(self, expected: str, *, patient: bool = False) -> None:
        """Wait until each rank has said that; `patient` ones may take any time for it.

        Raises:
            ModelLoadFailed: One says something else, has ended, or hangs.
        """
        waiting = {child.pipe: rank for rank, child in self._children.items()}
        while waiting:
            ready = wait(list(waiting), None if patient else self._timeout_s)
            if not ready:
                self._refuse(min(waiting.values()), f"no answer for {self._timeout_s:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    said = self._children[rank].hear()
                except (EOFError, OSError):
                    how = self._children[rank].how_ended()
                    said = Failed(f"it {how}; the replica's log has more")
                if said != expected:
                    self._refuse(rank, said.cause if isinstance(said, Failed) else said)

    def await_own(self, own: Future[None]) -> None:
        """Wait for what this process does together with the ranks; raises what it raises.

        Raises:
            DeviceLost: One of them has ended meanwhile, which this process may never be told by
                what it does.
        """
        while not wait_for((own,), _NOTICE_S).done:
            self.check()
        own.result()

    def last_words(self) -> str | None:
        """Return how a rank has ended, and why where it has said so; None if none has."""
        if self._ended():
            self._faulty.wait(_NOTICE_S)
        return self.fault

    def watch_ends(self) -> None:
        """Notice the end of a rank from here on."""
        for rank, child in self._children.items():
            threading.Thread(
                target=self._watch, args=(rank, child), name=f"rank{rank}", daemon=True
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
        limit_s = self._timeout_s
        how = f"has not answered for {limit_s:g} s"
        while waiting:
            ready = wait(list(waiting), limit_s)
            if not ready:
                self.fail(f"rank {min(waiting.values())} {how}")
                self.check()
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                heard[rank] = said = self._receive(rank)
                if isinstance(said, Failed):
                    limit_s = UNDO_S
                    how = f"is still in a call that has failed: {said.cause}"
        return heard

    def undo(self, ranks: Sequence[int], cause: str) -> None:
        """After a call that has failed in these ranks: make sure that none is in it any more.

        Raises:
            DeviceLost: One is, or has ended.
        """
        if self._faulty.wait(_NOTICE_S if self._ended() else 0):
            self.check()
        self.tell(UNDONE, ranks)
        for rank in ranks:
            said = self._receive(rank) if self._children[rank].pipe.poll(UNDO_S) else None
            if isinstance(said, Failed):  # its last words
                self.fail(f"rank {rank} of {self._world_size} ends: {said.cause}")
            elif said != UNDONE:
                self.fail(f"rank {rank} is still in a call that has failed: {cause}")
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
            _logger.critical("%s; the replica cannot continue", why)
            self._on_fault(why)

    def dismiss(self) -> None:
        """Tell all ranks that it is over; their ends are no fault from here on."""
        self._closing = True
        for child in self._children.values():
            try:
                send(child.pipe, END)
            except OSError:
                _logger.debug("a rank had ended before it was told to")

    def close(self) -> None:
        """See to it that all ranks, which have been dismissed, have ended."""
        deadline = time.monotonic() + _END_S
        for child in self._children.values():
            child.end(deadline)

    def _refuse(self, rank: int, cause: str) -> NoReturn:
        who = f"{self._model}: rank {rank} of {self._world_size}"
        raise ModelLoadFailed(f"{who} could not start: {cause}")

    def _receive(self, rank: int) -> Any:
        try:
            return self._children[rank].hear()
        except (EOFError, OSError):
            self._lose(rank)

    def _lose(self, rank: int) -> NoReturn:
        self._faulty.wait(_NOTICE_S)
        self.fail(f"rank {rank} of {self._world_size} no longer answers")
        raise DeviceLost(self.fault or "")

    def _ended(self) -> bool:
        return any(child.has_ended for child in self._children.values())

    def _watch(self, rank: int, child: RankChild) -> None:
        how = child.how_ended()
        if not self._closing:
            self.fail(f"rank {rank} of {self._world_size} {how}")
