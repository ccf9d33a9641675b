"""A denoiser on ranks, for a benchmark: a process of its own that is rank 0 of them.

A process can be rank 0 of one set of ranks only; so several sets can be measured in turns. Knows
nothing of what is compared.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import diffusers
import torch

from configs.stages import EngineArgs, ParallelConfig
from scripts.bench_denoisers import DENOISERS
from workers.devices.lane import open_lanes
from workers.devices.ranks import Ranks
from workers.devices.weight_dtype import weight_dtype

_READY = "ready"
_END_S = 30.0


@dataclass(frozen=True)
class RankSetup:
    """What such a process is told.

    Attributes:
        folder: Where the denoiser was saved, in a folder of the name of its part.
        size: Key of ``DENOISERS``.
        name: Key of its entry.
        kind: `cpu` or `cuda`.
        parallel: How many ranks and groups.
    """

    folder: str
    size: str
    name: str
    kind: str
    parallel: ParallelConfig


class RanksInTurn:
    """This side of such a process."""

    def __init__(self, pipe: Connection) -> None:
        """Wait until it is ready."""
        self._pipe = pipe
        self._heard(_READY)

    def prepare(self, rows: int) -> None:
        """Have the calls from here on be of so many rows."""
        self._pipe.send(rows)
        self._heard(_READY)

    def run(self) -> float:
        """Return the seconds of one call."""
        self._pipe.send(None)
        seconds: float = self._heard()
        return seconds

    def _heard(self, expected: Any = None) -> Any:
        try:
            said = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the ranks have ended; what they wrote says why") from None
        assert expected is None or said == expected
        return said


@contextmanager
def ranks_in_turn(setup: RankSetup) -> Iterator[RanksInTurn]:
    """Start the process and its ranks; they end with the block."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(setup, theirs), daemon=False)
    process.start()
    theirs.close()
    try:
        yield RanksInTurn(ours)
    finally:
        ours.close()  # which it takes for the end
        process.join(_END_S)
        process.kill()


def _serve(setup: RankSetup, pipe: Connection) -> None:
    spec = DENOISERS[setup.size][setup.name]
    args = EngineArgs(setup.folder, parallel_config=setup.parallel)
    dtype = weight_dtype(args, setup.kind)
    lane, *others = open_lanes(setup.kind, setup.parallel.world_size)
    for each in others:
        each.close()
    kind: Any = getattr(diffusers, type(spec.make(torch.device("meta"), dtype)).__name__)
    module = kind.from_pretrained(setup.folder, subfolder=spec.part, dtype=dtype)
    module = module.to(lane.device).eval()
    with closing(lane), closing(Ranks.start(args, {spec.part: module}, lane)):
        pipe.send(_READY)
        arguments: dict[str, Any] = {}
        while True:
            try:
                rows = pipe.recv()
            except EOFError:
                return
            if rows is None:
                pipe.send(seconds_of(module, arguments, lane.device))
            else:
                arguments = spec.arguments(rows, lane.device, dtype)
                pipe.send(_READY)


def seconds_of(module: Any, arguments: dict[str, Any], device: torch.device) -> float:
    """Return the seconds of one call, with the device idle before and after it."""
    with torch.inference_mode():
        _await(device)
        started = time.perf_counter()
        module(**arguments)
        _await(device)
        return time.perf_counter() - started


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
