"""The ranks of a replica: processes that run each denoiser call together with this one.

This process is rank 0. It starts the others, tells them of each call, and runs its own part, in its
pipelines' loops as ever: steps, interrupts and the rendezvous know nothing of ranks. A rank that
ends, or fails where the others do not, ends the replica, for its group can not be mended. Does not
know pipelines and requests.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.errors import DeviceLost, ModelLoadFailed
from configs.stages import EngineArgs
from workers.call_packing import as_bytes, pack
from workers.context_parallel import share_sequence
from workers.denoiser_changes import repeat_changes
from workers.failure_cause import short_cause
from workers.lane import Lane, chunk_cores
from workers.rank_group import join_group, open_store
from workers.rank_messages import (
    END,
    JOIN,
    LOADED,
    READY,
    UNDONE,
    VERDICT_S,
    Change,
    Failed,
    Forward,
    Start,
    receive,
    send,
)

_logger = logging.getLogger(__name__)

_REPOSITORY = Path(__file__).parents[1]
_END_S = 2.0
# Seconds in which the end of a rank is noticed once a collective has failed by it.
_NOTICE_S = 2.0
_NOWHERE = torch.device("meta")


class Ranks:
    """The other ranks of this process, started by :meth:`start`."""

    def __init__(self, args: EngineArgs, denoisers: Mapping[str, Any], lane: Lane) -> None:
        """Start nothing yet."""
        self._args = args
        self._denoisers = denoisers
        self._lane = lane
        self._device: torch.device = next(iter(denoisers.values())).device
        self._world_size = args.parallel_config.world_size
        self._children: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._fault: str | None = None
        self._faulty = threading.Event()
        self._on_fault: Callable[[str], None] = lambda _: None

    @classmethod
    def start(cls, args: EngineArgs, denoisers: Mapping[str, Any], lane: Lane) -> "Ranks":
        """Start the ranks and have them share each call of the denoisers from here on.

        The process ends its ranks when the thread that calls this ends.

        Raises:
            ModelLoadFailed: One could not start; none is left.
        """
        ranks = cls(args, denoisers, lane)
        try:
            ranks._open()
        except ModelLoadFailed:
            ranks.close()
            raise
        except Exception as error:
            ranks.close()
            _logger.exception("the ranks could not be brought together")
            cause = ranks._fault or short_cause(error)
            raise ModelLoadFailed(f"{args.model}: parallel_config: {cause}") from None
        return ranks

    def watch(self, on_fault: Callable[[str], None]) -> None:
        """Call `on_fault` with the reason, in a thread, once the ranks can work no more."""
        self._on_fault = on_fault
        if self._fault is not None:
            on_fault(self._fault)

    def close(self) -> None:
        """End the other ranks; calls of the denoisers fail from here on."""
        self._closing = True
        for _, pipe in self._children:
            try:
                send(pipe, END)
            except OSError:
                _logger.debug("a rank had ended before it was told to")
        for process, pipe in self._children:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            pipe.close()
        # NCCL would wait for ranks that are gone.
        if dist.is_initialized() and (self._fault is None or self._device.type == "cpu"):
            dist.destroy_process_group()

    def _open(self) -> None:
        store = open_store(self._world_size)
        cores = chunk_cores(self._world_size)
        described = {
            name: (type(module).__name__, module.dtype) for name, module in self._denoisers.items()
        }
        for rank in range(1, self._world_size):
            first = Start(
                rank=rank,
                world_size=self._world_size,
                port=store.port,
                core=cores[rank],
                args=self._args,
                kind=self._device.type,
                denoisers=described,
            )
            self._children.append(_start_rank(first))
        self._await(LOADED)
        for _, pipe in self._children:
            send(pipe, JOIN)
        for rank, (process, _) in enumerate(self._children, 1):
            threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank{rank}", daemon=True
            ).start()
        self._lane.submit(self._join, store).result()
        self._await(READY)
        for name, module in self._denoisers.items():
            self._mirror(name, module)

    def _join(self, store: Any) -> None:
        join_group(0, self._world_size, store.port, self._device, store)
        for module in self._denoisers.values():
            share_sequence(module, self._args.parallel_config)

    def _await(self, expected: str) -> None:
        """Wait until each rank has said that; a model may take any time to load."""
        for rank, (process, pipe) in enumerate(self._children, 1):
            try:
                said = receive(pipe)
            except (EOFError, OSError):
                code = process.wait()
                said = Failed(f"it ended with exit code {code}; the replica's log has more")
            if said != expected:
                cause = said.cause if isinstance(said, Failed) else said
                who = f"{self._args.model}: rank {rank} of {self._world_size}"
                raise ModelLoadFailed(f"{who} could not start: {cause}")

    def _mirror(self, name: str, module: Any) -> None:
        forward = module.forward

        def mirrored(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return self._lane.submit(self._call, name, forward, args, kwargs).result()

        def repeat(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with self._lock:
                self._change(name, method, args, kwargs)

        module.forward = mirrored
        repeat_changes(module, repeat)

    def _call(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._check()
        packed, tensors = pack((args, kwargs), self._device)
        sent = as_bytes(tensors)
        try:
            self._tell(Forward(name, packed))
            for each in sent:
                dist.broadcast(each, src=0)
            return forward(*args, **kwargs)
        except BaseException:
            self._undo()
            raise

    def _change(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Have all ranks do what has been done to a denoiser here."""
        self._check()
        if "_pipeline" in kwargs:  # for parts that are offloaded, which do not go with ranks
            kwargs = {**kwargs, "_pipeline": None}
        packed, _ = pack((args, kwargs), _NOWHERE)
        self._tell(Change(name, method, packed))
        for rank, (_, pipe) in enumerate(self._children, 1):
            try:
                said = receive(pipe)
            except (EOFError, OSError):
                self._faulty.wait(_NOTICE_S)
                continue
            if isinstance(said, Failed):
                self._fail(f"rank {rank} could not do {method}, which rank 0 did: {said.cause}")
        self._check()

    def _tell(self, message: Any) -> None:
        for _, pipe in self._children:
            send(pipe, message)

    def _undo(self) -> None:
        """After a call that failed here: make sure that it failed everywhere, or give up."""
        if self._faulty.wait(_NOTICE_S if self._ended() else 0):
            self._check()
        try:
            self._tell(UNDONE)
            for rank, (_, pipe) in enumerate(self._children, 1):
                if not pipe.poll(VERDICT_S) or receive(pipe) != UNDONE:
                    self._fail(f"rank {rank} is still in a call that failed in rank 0")
        except (EOFError, OSError):
            self._faulty.wait(_NOTICE_S)
        self._check()

    def _ended(self) -> bool:
        return any(process.poll() is not None for process, _ in self._children)

    def _check(self) -> None:
        if self._fault is not None:
            raise DeviceLost(self._fault)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._fail(f"rank {rank} of {self._world_size} {how}")

    def _fail(self, why: str) -> None:
        if self._fault is None:
            self._fault = why
            self._faulty.set()
            _logger.critical("%s; the replica can not go on", why)
            self._on_fault(why)


def _start_rank(first: Start) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    process = subprocess.Popen(  # noqa: S603 - this interpreter, this module
        [sys.executable, "-m", "workers.rank", str(theirs.fileno()), str(os.getpid())],
        cwd=_REPOSITORY,
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    with contextlib.suppress(BrokenPipeError):  # it has ended, which its silence will tell
        send(ours, first)
    return process, ours
