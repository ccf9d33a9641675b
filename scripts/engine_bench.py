"""What sharing denoiser calls buys on this machine: ``python -m scripts.engine_bench``.

Makes N pictures four ways: by the bare pipeline one after another (serial), by the bare pipeline in
one call (static), and by the engine from N threads at once, sharing denoiser calls (shared) or not
(unshared). Each repetition runs all four, so that what else the machine does falls on all alike;
the figures are medians, speed-ups those of ratios inside a repetition. The last line on stdout is
one JSON document. Knows nothing of replicas and HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from configs.stages import EngineArgs, ReplicaPlan, RuntimeConfig, StageConfig
from routing.parameters import Parameters
from workers.abilities import inspect_abilities
from workers.engine import Engine
from workers.observer import SilentObserver
from workers.pipeline_loader import load_pipeline

BUNDLED = Path(__file__).parents[1] / "models" / "tiny"
PROMPTS = (
    "a red circle on a blue background",
    "a green square",
    "a blue star at the top",
    "a heart",
)
WAYS = ("serial", "static", "shared", "unshared")


@dataclass(frozen=True)
class Row:
    """What N pictures took: seconds each way, speed-ups over serial, requests in a shared call."""

    n: int
    seconds: dict[str, float]
    speedup: dict[str, float]
    lowest: dict[str, float]
    highest: dict[str, float]
    batch_mean: float


class Bench:
    """One model, loaded twice: bare, and in the engine."""

    def __init__(self, plan: ReplicaPlan, steps: int, guidance: float) -> None:
        """Load the model of `plan`."""
        self._bare = load_pipeline(plan)
        served = load_pipeline(plan)
        self._engine = Engine(served, inspect_abilities(served, plan.stage.default_sampling_params))
        self._steps = steps
        self._guidance = guidance
        self.batch_means: list[float] = []

    def run(self, n: int, way: str) -> float:
        """Return the seconds that `n` pictures take that way."""
        ways: dict[str, Callable[[int], None]] = {
            "serial": self._serial,
            "static": self._static,
            "shared": self._shared,
            "unshared": self._unshared,
        }
        started = time.perf_counter()
        ways[way](n)
        return time.perf_counter() - started

    def _serial(self, n: int) -> None:
        for index in range(n):
            self._call([index])

    def _static(self, n: int) -> None:
        self._call(list(range(n)))

    def _call(self, seeds: list[int]) -> None:
        abilities = self._engine.abilities
        with torch.inference_mode():
            self._bare(
                [PROMPTS[seed % len(PROMPTS)] for seed in seeds],
                width=abilities.default_width,
                height=abilities.default_height,
                num_inference_steps=self._steps,
                guidance_scale=self._guidance,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                output_type="np",
            )

    def _shared(self, n: int) -> None:
        self.batch_means.append(self._threads(n, deterministic=False))

    def _unshared(self, n: int) -> None:
        self._threads(n, deterministic=True)

    def _threads(self, n: int, *, deterministic: bool) -> float:
        start = threading.Barrier(n)

        def make(seed: int) -> float:
            asked = Parameters(
                prompt=PROMPTS[seed % len(PROMPTS)],
                seed=seed,
                width=self._engine.abilities.default_width,
                height=self._engine.abilities.default_height,
                num_inference_steps=self._steps,
                guidance_scale=self._guidance,
                deterministic=deterministic,
            )
            start.wait()
            return self._engine.generate(asked, SilentObserver()).batch_mean

        with ThreadPoolExecutor(n) as pool:
            means = list(pool.map(make, range(n)))
        return sum(means) / n


def measure(bench: Bench, n: int, repeats: int) -> Row:
    """Run all ways `repeats` times, after once that does not count."""
    for way in WAYS:
        bench.run(n, way)
    bench.batch_means.clear()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        # Turned each time, so that no way always runs in another's wake.
        for way in WAYS[repeat % len(WAYS) :] + WAYS[: repeat % len(WAYS)]:
            times[way].append(bench.run(n, way))
    ratios = {
        way: [serial / own for serial, own in zip(times["serial"], times[way], strict=True)]
        for way in WAYS
    }
    return Row(
        n=n,
        seconds={way: round(median(times[way]), 3) for way in WAYS},
        speedup={way: round(median(ratios[way]), 2) for way in WAYS},
        lowest={way: round(min(ratios[way]), 2) for way in WAYS},
        highest={way: round(max(ratios[way]), 2) for way in WAYS},
        batch_mean=round(median(bench.batch_means), 2),
    )


def table(row: Row) -> str:
    """Return a line for the row, as Markdown."""
    speedups = " | ".join(
        f"{row.speedup[way]:.2f} [{row.lowest[way]:.2f}-{row.highest[way]:.2f}]" for way in WAYS[1:]
    )
    return f"| {row.n} | {row.seconds['serial']:.2f} s | {speedups} | {row.batch_mean:.2f} |"


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED, help="folder of a pipeline")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, as a replica's cores")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 2, 4, 8], help="requests at once")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    chosen = options()
    args = EngineArgs(model=str(chosen.model), device=chosen.device)
    devices = tuple(range(chosen.threads)) if chosen.device != "cuda" else (0,)
    stage = StageConfig(0, RuntimeConfig(devices), args)
    bench = Bench(ReplicaPlan("replica0", 0, stage, devices), chosen.steps, chosen.guidance)
    before = os.getloadavg()[0]
    print("| N | serial | static | shared | unshared | requests in a call |")
    print("|---|---|---|---|---|---|", flush=True)
    rows: list[dict[str, Any]] = []
    for n in chosen.at:
        row = measure(bench, n, chosen.repeats)
        rows.append(asdict(row))
        print(table(row), flush=True)
    load = [round(before, 2), round(os.getloadavg()[0], 2)]
    print(
        json.dumps({"model": chosen.model.name, "steps": chosen.steps, "load": load, "rows": rows})
    )


if __name__ == "__main__":
    main()
