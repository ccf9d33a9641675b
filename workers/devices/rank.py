"""A rank of a replica: ``python -m workers.devices.rank <fd>``, started by it, never by hand."""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from workers.devices.context_parallel import PartSizes
from workers.devices.rank_group import meet, rank_groups
from workers.devices.rank_messages import (
    END,
    JOIN,
    LOADED,
    READY,
    SEND_OUTPUT,
    TO_FLOAT32,
    TO_USUAL_DTYPE,
    UNDO_S,
    UNDONE,
    Failed,
    Forward,
    ForwardDone,
    MethodCall,
    Start,
    as_bytes,
    pack,
    receive,
    send,
    unpack,
)
from workers.devices.weights import load_denoisers
from workers.failures import is_out_of_memory, short_cause
from workers.patches import in_float32
from workers.sharing.merging import choose_rows

_logger = logging.getLogger(__name__)


class RankCalls:
    """The calls of one rank, as rank 0 tells it of them."""

    def __init__(
        self,
        start: Start,
        device: torch.device,
        denoisers: Mapping[str, Any],
        pipe: Connection,
        sizes: PartSizes,
    ) -> None:
        """Run nothing yet."""
        groups = rank_groups(start.args.parallel_config)
        self._group = next(index for index, each in enumerate(groups) if start.rank in each)
        self._gives_back = self._group > 0 and start.rank == groups[self._group][0]
        self._device = device
        self._denoisers = denoisers
        self._pipe = pipe
        self._sizes = sizes
        # Of the last call, until rank 0 takes it.
        self._output: list[torch.Tensor] = []

    def run(self, message: Forward) -> None:
        """Run this rank's part of a call, if it has one."""
        self._output = []
        if self._group >= max(len(message.split), 1):
            self._arguments(message)
            return
        try:
            args, kwargs = self._arguments(message)
            if message.split:
                kwargs = choose_rows(kwargs, message.split[self._group], message.rows)
            said: ForwardDone | Failed = self._keep(
                self._denoisers[message.denoiser](*args, **kwargs)
            )
        except Exception as error:  # noqa: BLE001 - rank 0 raises it too, or this process ends
            said = Failed(short_cause(error), is_out_of_memory(error))
        if self._group > 0:
            send(self._pipe, said)
        elif isinstance(said, Failed):
            self._await_undo(said.cause)

    def give_back(self) -> None:
        """Send the output to rank 0, which waits for it."""
        for each in self._output:
            dist.send(each, dst=0)
        self._output = []

    def settle(self) -> None:
        """Say that no call is going on here, after one that failed in this group."""
        self._output = []
        self._sizes.forget()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # too little memory is why most calls fail
        send(self._pipe, UNDONE)

    def _arguments(self, message: Forward) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, which all ranks get together, those without a part too."""
        (args, kwargs), tensors = unpack(message.packed, self._device)
        for each in as_bytes(tensors):
            dist.broadcast(each, src=0)
        return args, kwargs

    def _keep(self, output: Any) -> ForwardDone:
        if not self._gives_back:
            return ForwardDone()
        packed, tensors = pack(output, self._device)
        self._output = as_bytes(tensors)
        return ForwardDone(packed)

    def _await_undo(self, cause: str) -> None:
        """After a call that failed here: end it as rank 0 does, or end this process.

        Were rank 0 to go on, it would wait in a collective that this rank has left.
        """
        if not self._pipe.poll(UNDO_S) or receive(self._pipe) != UNDONE:
            raise RuntimeError(f"failed in a call in which rank 0 did not: {cause}")
        self.settle()


_PR_SET_PDEATHSIG = 1


_CPU = torch.device("cpu")


# No tensor is there, so that all are pickled.
_NOWHERE = torch.device("meta")


class Rank:
    """This process as a rank."""

    def __init__(self, start: Start, pipe: Connection) -> None:
        """Take the device; nothing is loaded yet."""
        self._start = start
        self._pipe = pipe
        self._device = torch.device(start.kind, start.rank) if start.kind == "cuda" else _CPU
        self._denoisers: dict[str, Any] = {}
        self._float32 = ExitStack()
        self._sizes = PartSizes()
        self._calls = RankCalls(start, self._device, self._denoisers, pipe, self._sizes)
        if start.kind == "cuda":
            torch.cuda.set_device(self._device)
        else:
            if start.core is not None:
                os.sched_setaffinity(0, {start.core})
            torch.set_num_threads(1)

    def load(self) -> None:
        """Load the denoisers onto the device, as rank 0 has them."""
        start = self._start
        for name, module in load_denoisers(start.args, start.denoisers, self._device).items():
            self._denoisers[name] = module.to(self._device)

    def join(self) -> None:
        """Meet the other ranks; all do this at the same time."""
        start = self._start
        parallel = start.args.parallel_config
        meet(start.rank, parallel, start.port, self._denoisers, self._sizes)

    def leave(self) -> None:
        """Leave the other ranks, which do so at the same time."""
        dist.destroy_process_group()

    def serve(self) -> None:
        """Run what rank 0 tells until it says that it is over."""
        while True:
            message = receive(self._pipe)
            if message == END:
                return
            if message == UNDONE:
                self._calls.settle()
            elif message == SEND_OUTPUT:
                self._calls.give_back()
            elif isinstance(message, Forward):
                self._calls.run(message)
            elif isinstance(message, MethodCall):
                self._answer(self._change, message)
            elif message == TO_FLOAT32:
                self._answer(self._to_float32)
            elif message == TO_USUAL_DTYPE:
                self._answer(self._float32.close)

    def _answer(self, do: Callable[..., None], *args: Any) -> None:
        """Do it and say so, or why it could not be done."""
        try:
            do(*args)
        except Exception as error:  # noqa: BLE001 - raised by rank 0
            send(self._pipe, Failed(short_cause(error), is_out_of_memory(error)))
        else:
            send(self._pipe, READY)

    def _change(self, message: MethodCall) -> None:
        (args, kwargs), _ = unpack(message.packed, _NOWHERE)
        denoiser = self._denoisers[message.denoiser]
        getattr(denoiser, message.method)(*args, **kwargs)
        denoiser.eval()  # the layers of a new adapter are not

    def _to_float32(self) -> None:
        self._float32.enter_context(in_float32(self._denoisers.values()))


def main() -> None:
    """Be the rank that the first message tells."""
    pipe = Connection(int(sys.argv[1]))
    end_with_parent(int(sys.argv[2]))
    # Signals are for the replica; it ends its ranks once it needs them no more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start: Start = receive(pipe)
    logging.basicConfig(format=f"rank {start.rank} of {start.world_size}: %(message)s")
    code = _run(start, pipe)
    sys.stderr.flush()
    # Not by way of torch, whose teardown waits for ranks that may be gone.
    os._exit(code)


def _run(start: Start, pipe: Connection) -> int:
    """Load, join and serve; returns the exit code."""
    try:
        try:
            rank = Rank(start, pipe)
            rank.load()
            send(pipe, LOADED)
            if receive(pipe) != JOIN:
                return 0
            rank.join()
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            _logger.exception("%s could not be brought onto this rank", start.args.model)
            send(pipe, Failed(short_cause(error)))
            return 1
        send(pipe, READY)
        with torch.inference_mode():
            rank.serve()
        rank.leave()
    except (EOFError, ConnectionError):
        _logger.warning("the replica has ended, and this rank ends with it")
    except Exception as error:
        _logger.exception("this rank ends, and the replica with it: %s", short_cause(error))
        with suppress(OSError):
            send(pipe, Failed(short_cause(error)))
        return 1
    return 0


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be told
        os._exit(1)


if __name__ == "__main__":
    main()
