"""A rank of a replica: ``python -m workers.devices.rank <fd>``, started by it, never by hand.

It holds the denoisers alone and runs each call of theirs that rank 0, the replica itself, tells it
of. It ends with its parent, however that ends. Does not know pipelines, requests and Redis.
"""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from workers.denoiser.failure_cause import is_out_of_memory, short_cause
from workers.devices.call_packing import unpack
from workers.devices.denoiser_loader import load_denoisers
from workers.devices.raised_weights import in_float32
from workers.devices.rank_calls import RankCalls
from workers.devices.rank_group import meet
from workers.devices.rank_messages import (
    END,
    FALL,
    JOIN,
    LOADED,
    READY,
    RISE,
    TAKE,
    UNDONE,
    Change,
    Failed,
    Forward,
    Start,
    receive,
    send,
)

_PR_SET_PDEATHSIG = 1
_CPU = torch.device("cpu")
# No tensor is there, so that all are pickled.
_NOWHERE = torch.device("meta")
_logger = logging.getLogger(__name__)


class Rank:
    """This process as a rank."""

    def __init__(self, start: Start, pipe: Connection) -> None:
        """Take the device; nothing is loaded yet."""
        self._start = start
        self._pipe = pipe
        self._device = torch.device(start.kind, start.rank) if start.kind == "cuda" else _CPU
        self._denoisers: dict[str, Any] = {}
        self._raised = ExitStack()
        self._calls = RankCalls(start, self._device, self._denoisers, pipe)
        if start.kind == "cuda":
            torch.cuda.set_device(self._device)
        else:
            if start.core is not None:
                os.sched_setaffinity(0, {start.core})
            torch.set_num_threads(1)

    def load(self) -> None:
        """Load the denoisers onto the device, as rank 0 has them."""
        start = self._start
        for name, module in load_denoisers(start.args, start.denoisers, start.kind).items():
            self._denoisers[name] = module.to(self._device)

    def join(self) -> None:
        """Meet the other ranks; all do this at the same time."""
        start = self._start
        meet(start.rank, start.args.parallel_config, start.port, self._denoisers)

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
            elif message == TAKE:
                self._calls.give_back()
            elif isinstance(message, Forward):
                self._calls.run(message)
            elif isinstance(message, Change):
                self._answer(self._change, message)
            elif message == RISE:
                self._answer(self._rise)
            elif message == FALL:
                self._answer(self._raised.close)

    def _answer(self, do: Callable[..., None], *args: Any) -> None:
        """Do it and say so, or why it could not be done."""
        try:
            do(*args)
        except Exception as error:  # noqa: BLE001 - raised by rank 0
            send(self._pipe, Failed(short_cause(error), is_out_of_memory(error)))
        else:
            send(self._pipe, READY)

    def _change(self, message: Change) -> None:
        (args, kwargs), _ = unpack(message.packed, _NOWHERE)
        denoiser = self._denoisers[message.denoiser]
        getattr(denoiser, message.method)(*args, **kwargs)
        denoiser.eval()  # the layers of a new adapter are not

    def _rise(self) -> None:
        self._raised.enter_context(in_float32(self._denoisers.values()))


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
