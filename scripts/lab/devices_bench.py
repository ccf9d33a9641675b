"""What several devices buy a denoiser: ``python -m scripts.lab.devices_bench``.

Each way of sharing its calls (copies, ranks, groups of ranks) is measured in turns with one device.
A process can be rank 0 of one set of ranks only, so each set has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch

from configs.stage_config import EngineArgs, ParallelConfig
from scripts.lab.bench_denoisers import DENOISERS
from workers.devices.copies import open_device_threads, spread_rows
from workers.devices.ranks import Ranks
from workers.devices.weights import weight_dtype

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
    device_thread, *others = open_device_threads(setup.kind, setup.parallel.world_size)
    for each in others:
        each.close()
    kind: Any = getattr(diffusers, type(spec.make(torch.device("meta"), dtype)).__name__)
    module = kind.from_pretrained(setup.folder, subfolder=spec.part, dtype=dtype)
    module = module.to(device_thread.device).eval()
    with closing(device_thread), closing(Ranks.start(args, {spec.part: module}, device_thread)):
        pipe.send(_READY)
        arguments: dict[str, Any] = {}
        while True:
            try:
                rows = pipe.recv()
            except EOFError:
                return
            if rows is None:
                pipe.send(seconds_of(module, arguments, device_thread.device))
            else:
                arguments = spec.arguments(rows, device_thread.device, dtype)
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


WAYS = ("one", "threads", "copies", "ranks", "groups")
_NOT_COUNTED = 3  # repetitions of each call before those that are


@dataclass(frozen=True)
class DevicesRow:
    """Milliseconds of a call on one device, and speed-ups over it: median, lowest, highest."""

    denoiser: str
    rows: int
    one_ms: float
    speedup: dict[str, tuple[float, float, float]]


def degrees(way: str, count: int) -> ParallelConfig:
    """Return what a stage file says for that way with so many devices."""
    if way == "ranks":
        return ParallelConfig(count, ulysses_degree=count)
    return ParallelConfig(count, cfg_parallel_size=2, ulysses_degree=count // 2)


class DevicesBench:
    """One denoiser, ready in each way."""

    def __init__(
        self, size: str, name: str, kind: str, count: int, ways: Sequence[str], closing: ExitStack
    ) -> None:
        """Put the denoiser on the devices for those ways; `closing` ends what was started."""
        self._spec = DENOISERS[size][name]
        self._kind = kind
        self._count = count
        self._dtype = weight_dtype(EngineArgs(name), kind)
        self._device_threads = open_device_threads(kind, count)
        for device_thread in self._device_threads:
            closing.callback(device_thread.close)
        self._home = self._device_threads[0].device
        self._module = self._spec.make(self._home, self._dtype)
        self._arguments: dict[str, Any] = {}
        self._ranks: dict[str, RanksInTurn] = {}
        self._own = {"one", *ways} & {"one", "threads", "copies"}
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        for way in self._on_ranks(ways):
            if not any(folder.iterdir()):
                self._module.save_pretrained(folder / self._spec.part)
            setup = RankSetup(str(folder), size, name, kind, degrees(way, count))
            self._ranks[way] = closing.enter_context(ranks_in_turn(setup))
        if "copies" in ways:
            spread_rows(self._module, self._device_threads)

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which it can run."""
        return tuple(way for way in WAYS if way in self._own or way in self._ranks)

    def prepare(self, rows: int) -> None:
        """Have the calls from here on be of so many rows."""
        self._arguments = self._spec.arguments(rows, self._home, self._dtype)
        for each in self._ranks.values():
            each.prepare(rows)

    def run(self, way: str) -> float:
        """Return the seconds of one call."""
        if way in self._ranks:
            return self._ranks[way].run()
        if way == "copies":
            return seconds_of(self._module, self._arguments, self._home)

        def plain(**arguments: Any) -> Any:
            """The call past the copies."""
            return type(self._module).forward(self._module, **arguments)

        if way == "threads":
            return seconds_of(plain, self._arguments, self._home)
        alone: float = (
            self._device_threads[0].submit(seconds_of, plain, self._arguments, self._home).result()
        )
        return alone

    def _on_ranks(self, ways: Sequence[str]) -> list[str]:
        planned = getattr(self._module, "_cp_plan", None) is not None
        return [
            way
            for way in ("ranks", "groups")
            if way in ways and (planned or degrees(way, self._count).context_degree == 1)
        ]


def measure(bench: DevicesBench, name: str, rows: int, repeats: int) -> DevicesRow:
    """Run all ways `repeats` times, after some times that do not count."""
    bench.prepare(rows)
    times: dict[str, list[float]] = {way: [] for way in bench.ways}
    for repeat in range(-_NOT_COUNTED, repeats):
        turn = repeat % len(bench.ways)
        for way in bench.ways[turn:] + bench.ways[:turn]:
            seconds = bench.run(way)
            if repeat >= 0:
                times[way].append(seconds)
    ratios = {
        way: sorted(one / own for one, own in zip(times["one"], times[way], strict=True))
        for way in bench.ways[1:]
    }
    return DevicesRow(
        denoiser=name,
        rows=rows,
        one_ms=round(1000 * median(times["one"]), 1),
        speedup={
            way: (round(median(found), 2), round(found[0], 2), round(found[-1], 2))
            for way, found in ratios.items()
        },
    )


def table(row: DevicesRow) -> str:
    """Return a line for the row, as Markdown."""
    cells = [
        "{:.2f} [{:.2f}-{:.2f}]".format(*row.speedup[way]) if way in row.speedup else "none"
        for way in WAYS[1:]
    ]
    return f"| {row.denoiser} | {row.rows} | {row.one_ms:.1f} ms | {' | '.join(cells)} |"


def options() -> argparse.Namespace:
    """Read the command line."""
    names = [name for each in DENOISERS.values() for name in each]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--devices", type=int, default=2, help="cores or GPUs: 2 or 4, 6, ...")
    parser.add_argument("--size", choices=tuple(DENOISERS), default=None, help="real on CUDA")
    parser.add_argument("--denoisers", choices=dict.fromkeys(names), nargs="+", default=None)
    parser.add_argument("--ways", choices=WAYS[1:], nargs="+", default=list(WAYS[1:]))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4], help="rows of a call")
    chosen = parser.parse_args()
    if chosen.devices < 2 or chosen.devices % 2:
        parser.error(f"--devices {chosen.devices} makes no two groups; give an even number")
    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen.size = chosen.size or ("real" if chosen.device == "cuda" else "small")
    there = DENOISERS[chosen.size]
    if unknown := set(chosen.denoisers or ()) - set(there):
        parser.error(f"--size {chosen.size} has no {min(unknown)}; give one of {', '.join(there)}")
    if chosen.device == "cuda":
        chosen.ways = [way for way in chosen.ways if way != "threads"]
        if (count := torch.cuda.device_count()) < chosen.devices:
            parser.error(f"--devices {chosen.devices} is more than the {count} CUDA devices here")
    return chosen


def main() -> None:
    """Measure and print."""
    chosen = options()
    names = chosen.denoisers or list(DENOISERS[chosen.size])
    torch.set_num_threads(chosen.devices if "threads" in chosen.ways else 1)
    cores, before = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if chosen.device == "cpu" and cores < chosen.devices:
        print(f"{chosen.devices} devices on {cores} cores: this shows that it runs, and no speed\n")
    for name in names:
        print(f"{name}: {DENOISERS[chosen.size][name].about}")
    print(f"\n| denoiser | rows | one device | {' | '.join(WAYS[1:])} |")
    print("|---|---|---|---|---|---|---|", flush=True)
    rows: list[dict[str, Any]] = []
    for name in names:
        with ExitStack() as closing:
            bench = DevicesBench(
                chosen.size, name, chosen.device, chosen.devices, chosen.ways, closing
            )
            for number in chosen.rows:
                row = measure(bench, name, number, chosen.repeats)
                rows.append(asdict(row))
                print(table(row), flush=True)
    load = [round(before, 2), round(os.getloadavg()[0], 2)]
    said = {"devices": chosen.devices, "kind": chosen.device, "cores": cores, "load": load}
    print(json.dumps({**said, "rows": rows}))


if __name__ == "__main__":
    main()
