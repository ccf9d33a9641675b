"""What the engine makes of several requests here: ``python -m scripts.lab.engine_bench``.

Makes N pictures five ways: by the bare pipeline one after another (serial), by the bare pipeline in
one call (static), and by the engine from N threads, which come at once (together), spread over the
first half of what one picture takes alone (spread), or at once and forbidden to share (apart). Each
repetition runs all ways, so that what else the machine does falls on all alike; the figures are
medians of ratios inside a repetition.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from configs.parameters import Parameters
from scripts.lab.bench_models import MODELS, BenchModel, make
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.progress import SilentProgress

PROMPTS = (
    "a red circle on a blue background",
    "a green square",
    "a blue star at the top",
    "a heart",
)
WAYS = ("serial", "static", "together", "spread", "apart")


@dataclass(frozen=True)
class Row:
    """What N pictures took.

    Attributes:
        seconds: Medians, by way; of spread ones from the first arrival to the last picture.
        to_serial: Throughput in parts of that of the serial way, by way: median, lowest, highest.
        to_static: The same in parts of the static way's.
        cpu_to_static: CPU seconds of the static way in parts of each way's: on a machine that is
            busy with other work these tell more than the clock.
        to_waiting: Spread ones against one static batch begun when the last has come, median.
        batch_mean: Requests in a denoiser call when they come together, and when spread.
    """

    model: str
    n: int
    seconds: dict[str, float]
    to_serial: dict[str, tuple[float, float, float]]
    to_static: dict[str, tuple[float, float, float]]
    cpu_to_static: dict[str, tuple[float, float, float]]
    to_waiting: float
    batch_mean: tuple[float, float]


class Bench:
    """One model, made twice: bare, and in the engine."""

    def __init__(self, model: BenchModel, device: str) -> None:
        """Make the model and warm it up as a replica does."""
        self._model = model
        self._bare = make(model, device)
        served = make(model, device)
        abilities = replace(
            inspect_abilities(served, {}), default_width=model.size, default_height=model.size
        )
        self._engine = Engine(served, abilities, max_num_seqs=8)
        self._engine.warm_up()
        self._device = device
        self._pool = ThreadPoolExecutor(8)
        self._one_s = 0.0
        self.batch_means: dict[str, list[float]] = {way: [] for way in WAYS}

    def run(self, n: int, way: str) -> tuple[float, float]:
        """Return the seconds that `n` pictures take that way, and the CPU seconds."""
        ways: dict[str, Callable[[int], None]] = {
            "serial": self._serial,
            "static": self._static,
            "together": lambda n: self._threads(n, way),
            "spread": lambda n: self._threads(n, way, spread_s=self._one_s / 2),
            "apart": lambda n: self._threads(n, way, deterministic=True),
        }
        started, cpu = time.perf_counter(), time.process_time()
        ways[way](n)
        if self._device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        if way == "serial":
            self._one_s = seconds / n
        return seconds, time.process_time() - cpu

    @property
    def spread_s(self) -> float:
        """When the last of spread ones comes, seconds after the first."""
        return self._one_s / 2

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _serial(self, n: int) -> None:
        for index in range(n):
            self._call([index])

    def _static(self, n: int) -> None:
        self._call(list(range(n)))

    def _call(self, seeds: list[int]) -> None:
        with torch.inference_mode():
            self._bare(
                [PROMPTS[seed % len(PROMPTS)] for seed in seeds],
                width=self._model.size,
                height=self._model.size,
                num_inference_steps=self._model.steps,
                guidance_scale=self._model.guidance,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                output_type="np",
            )

    def _threads(
        self, n: int, way: str, *, spread_s: float = 0.0, deterministic: bool = False
    ) -> None:
        start = threading.Barrier(n)

        def make_one(seed: int) -> float:
            asked = Parameters(
                prompt=PROMPTS[seed % len(PROMPTS)],
                seed=seed,
                width=self._model.size,
                height=self._model.size,
                num_inference_steps=self._model.steps,
                guidance_scale=self._model.guidance,
                deterministic=deterministic,
            )
            if spread_s:
                start.wait()
                time.sleep(spread_s * seed / max(n - 1, 1))
            # As the runner does around the claim of a request.
            with self._engine.request_coming():
                if not spread_s:
                    start.wait()
                return self._engine.generate(asked, SilentProgress()).batch_mean

        means = list(self._pool.map(make_one, range(n)))
        self.batch_means[way].append(sum(means) / n)


def measure(name: str, bench: Bench, n: int, repeats: int) -> Row:
    """Run all ways `repeats` times, after once that does not count."""
    for way in WAYS:
        bench.run(n, way)
        bench.batch_means[way].clear()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    waited: list[float] = []
    for repeat in range(repeats):
        # Turned each time, so that no way always runs in another's wake.
        for way in WAYS[repeat % len(WAYS) :] + WAYS[: repeat % len(WAYS)]:
            seconds, cpu_seconds = bench.run(n, way)
            times[way].append(seconds)
            cpu[way].append(cpu_seconds)
        waited.append((times["static"][-1] + bench.spread_s) / times["spread"][-1])
    return Row(
        model=name,
        n=n,
        seconds={way: round(median(times[way]), 3) for way in WAYS},
        to_serial={way: _ratios(times["serial"], times[way]) for way in WAYS},
        to_static={way: _ratios(times["static"], times[way]) for way in WAYS},
        cpu_to_static={way: _ratios(cpu["static"], cpu[way]) for way in WAYS},
        to_waiting=round(median(waited), 2),
        batch_mean=(
            round(median(bench.batch_means["together"]), 2),
            round(median(bench.batch_means["spread"]), 2),
        ),
    )


def _ratios(reference: list[float], own: list[float]) -> tuple[float, float, float]:
    ratios = [one / other for one, other in zip(reference, own, strict=True)]
    return round(median(ratios), 2), round(min(ratios), 2), round(max(ratios), 2)


def table(row: Row) -> str:
    """Return a line for the row, as Markdown."""
    serial, static = row.to_serial, row.to_static
    cells = [
        f"{row.seconds['serial']:.2f} s",
        *(f"{serial[way][0]:.2f}" for way in ("static", "together", "spread", "apart")),
        *(
            f"{static[way][0]:.2f} [{static[way][1]:.2f}-{static[way][2]:.2f}]"
            for way in ("together", "spread")
        ),
        f"{row.cpu_to_static['together'][0]:.2f} / {row.cpu_to_static['spread'][0]:.2f}",
        f"{row.to_waiting:.2f}",
        f"{row.batch_mean[0]:.1f} / {row.batch_mean[1]:.1f}",
    ]
    return f"| {row.model} | {row.n} | " + " | ".join(cells) + " |"


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, as a replica's cores")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 2, 4, 8], help="requests at once")
    return parser.parse_args()


def main() -> None:
    """Measure and print; the last line on stdout is one JSON document."""
    chosen = options()
    torch.set_num_threads(chosen.threads)
    before = os.getloadavg()[0]
    print("| model | N | serial | static | together | spread | apart |", end="")
    print(
        " together : static | spread : static | CPU, both | spread : waiting | requests in a call |"
    )
    print("|" + "---|" * 12, flush=True)
    rows: list[dict[str, Any]] = []
    for name in chosen.models:
        model = MODELS[name]
        if model.cuda and not torch.cuda.is_available():
            print(f"{name}: left out, for it needs CUDA: {model.about}", flush=True)
            continue
        bench = Bench(model, "cuda" if torch.cuda.is_available() else "cpu")
        for n in chosen.at:
            row = measure(name, bench, n, chosen.repeats)
            rows.append(asdict(row))
            print(table(row), flush=True)
        bench.close()
        del bench
        gc.collect()
    load = [round(before, 2), round(os.getloadavg()[0], 2)]
    print(json.dumps({"load": load, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
