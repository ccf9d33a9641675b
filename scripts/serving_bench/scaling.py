"""The sweep over numbers of replicas: its plan, its results, its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from configs.devices import check_machine
from configs.machine import detect_machine
from configs.stage_config import StageConfig
from configs.stages import load_stages, reference_document
from scripts.launcher.preflight import StartRefused


@dataclass(frozen=True)
class SweepPlan:
    """One stage and the devices that its replicas may have, in the order they get them.

    Attributes:
        source: The stage file as it was given.
        stage: What it says of the stage that is swept.
        entry: The same, as it stands in the file.
        devices: All devices there are for it.
    """

    source: Path
    stage: StageConfig
    entry: Mapping[str, Any]
    devices: tuple[int, ...]

    def write(self, replicas: int, folder: Path) -> Path:
        """Write the stage file of so many replicas into the folder; returns its path."""
        entry = deepcopy(dict(self.entry))
        used = self.devices[: replicas * self.stage.devices_per_replica]
        entry["runtime"] = {
            **(entry.get("runtime") or {}),
            "num_replicas": replicas,
            "devices": ",".join(str(device) for device in used),
        }
        entry["engine_args"] = {**entry["engine_args"], "model": self.stage.engine_args.model}
        entry["engine_args"].setdefault("served_model_name", [*self.stage.model_names])
        path = folder / f"stages_{replicas}.yaml"
        path.write_text(yaml.safe_dump({"stages": [entry]}, sort_keys=False), encoding="utf-8")
        return path


def plan_sweep(
    path: Path,
    counts: Sequence[int],
    environ: Mapping[str, str],
    *,
    stage_id: int | None = None,
    model: str | None = None,
) -> SweepPlan:
    """Read the stage file and see that there are devices for every count.

    Args:
        path: The stage file.
        counts: Replica counts.
        environ: Where CUDA_VISIBLE_DEVICES may narrow the devices.
        stage_id: Which stage to sweep; needed where there are several.
        model: Folder or hub id in place of the one in the file.

    Raises:
        ConfigurationError: The file is refused, or this machine does not have its devices.
        StartRefused: There are fewer devices than the largest count needs.
    """
    stages = load_stages(path, model)
    entries = reference_document(path, model)["stages"]
    index = _picked(stages, stage_id, path)
    stage, entry = stages[index], entries[index]
    machine = detect_machine(environ)
    check_machine([stage], machine)
    named = (entry.get("runtime") or {}).get("devices") is not None
    there = machine.count_of(machine.kind_for(stage))
    devices = stage.runtime.devices if named else tuple(range(there))
    each, most = stage.devices_per_replica, max(counts)
    if most * each > len(devices):
        raise StartRefused(_too_few(most, each, devices, path if named else None))
    return SweepPlan(path, stage, entry, devices)


def _picked(stages: Sequence[StageConfig], stage_id: int | None, path: Path) -> int:
    ids = [stage.stage_id for stage in stages]
    if stage_id is None and len(ids) == 1:
        return 0
    if stage_id in ids:
        return ids.index(stage_id)
    known = ", ".join(str(known) for known in ids)
    raise StartRefused(f"{path} has several stages; choose one with --stage-id: {known}")


def _too_few(most: int, each: int, devices: tuple[int, ...], path: Path | None) -> str:
    """The refusal; `path` is the file that names the devices, if one does."""
    needed = f"{most} replicas need {most * each} devices ({each} each)"
    numbers = ",".join(str(device) for device in devices)
    have = f"runtime.devices of {path} names" if path else "this machine has"
    fit = len(devices) // each
    fix = f"use --replicas up to {fit}" if fit else "use a machine with more devices"
    where = ", or name more devices there" if path else ""
    return f"{needed}, but {have} {len(devices)} ({numbers}); {fix}{where}"


@dataclass(frozen=True)
class Scaling:
    """One replica count: medians over its runs, beside what perfect scaling would give.

    Throughput is in requests a second, latencies are in seconds.

    Attributes:
        replicas: The count.
        throughput: Median; `lowest` and `highest` are those of single runs.
        ideal: Throughput of the smallest count, times as many replicas.
        speedup: Over the smallest count: median of the ratios inside a round, since what else the
            machine does falls on both alike; with `speedup_lowest` and `speedup_highest`.
        efficiency: `speedup` over that of perfect scaling; 1 for the smallest count.
        latency_p50: Medians of the runs' percentiles, as `latency_p95` and `latency_p99`.
        run_time: Mean seconds that a request ran on its replica.
        failed: Failed requests of all runs.
    """

    replicas: int
    throughput: float
    lowest: float
    highest: float
    ideal: float
    speedup: float
    speedup_lowest: float
    speedup_highest: float
    efficiency: float
    latency_p50: float
    latency_p95: float
    latency_p99: float
    run_time: float
    failed: int


def scaling(runs: Sequence[Mapping[str, Any]]) -> list[Scaling]:
    """Return a row for each replica count.

    Args:
        runs: Of each run `replicas`, `round` and `figures`, as `figures` returned them.
    """
    counts = sorted({run["replicas"] for run in runs})
    first = counts[0]
    rounds: dict[int, dict[int, Mapping[str, Any]]] = {count: {} for count in counts}
    for run in runs:
        rounds[run["replicas"]][run["round"]] = run["figures"]
    base = median(_rate(found) for found in rounds[first].values())
    rows = []
    for count, found in rounds.items():
        pairs = [(_rate(one), _rate(rounds[first][number])) for number, one in found.items()]
        ratios = [own / smallest if smallest else 0.0 for own, smallest in pairs]
        rows.append(_row(count, list(found.values()), ratios, (base, first)))
    return rows


def scaling_table(rows: Sequence[Scaling]) -> str:
    """Return the rows as Markdown, which a terminal shows as well."""
    head = (
        "| replicas | requests/s (lowest to highest) | speed-up (lowest to highest) | efficiency "
        "| p50 | p95 | p99 | run | failed |"
    )
    lines = [
        f"| {row.replicas} | {row.throughput:.3f} ({row.lowest:.3f} to {row.highest:.3f}) "
        f"| {row.speedup:.2f} ({row.speedup_lowest:.2f} to {row.speedup_highest:.2f}) "
        f"| {row.efficiency:.0%} | {row.latency_p50:.2f} s | {row.latency_p95:.2f} s "
        f"| {row.latency_p99:.2f} s | {row.run_time:.2f} s | {row.failed} |"
        for row in rows
    ]
    return "\n".join([head, "|---" * 9 + "|", *lines])


def _row(
    count: int,
    found: Sequence[Mapping[str, Any]],
    ratios: Sequence[float],
    smallest: tuple[float, int],
) -> Scaling:
    """The row; `smallest` is the median throughput of the smallest count, and that count."""
    base, first = smallest
    rates = [_rate(one) for one in found]
    speedup = median(ratios)
    return Scaling(
        replicas=count,
        throughput=round(median(rates), 4),
        lowest=round(min(rates), 4),
        highest=round(max(rates), 4),
        ideal=round(base * count / first, 4),
        speedup=round(speedup, 4),
        speedup_lowest=round(min(ratios), 4),
        speedup_highest=round(max(ratios), 4),
        efficiency=round(speedup * first / count, 4),
        latency_p50=_median(found, "latency_p50"),
        latency_p95=_median(found, "latency_p95"),
        latency_p99=_median(found, "latency_p99"),
        run_time=round(median(one["run_time"]["mean"] for one in found), 4),
        failed=sum(one["failed_requests"] for one in found),
    )


def _median(found: Sequence[Mapping[str, Any]], name: str) -> float:
    values: list[float] = [one[name] for one in found]
    return round(median(values), 4)


def _rate(found: Mapping[str, Any]) -> float:
    rate: float = found["throughput_qps"]
    return rate


_DPI: Final = 100
_MEASURED: Final = "#4477aa"
_IDEAL: Final = "#999999"
_LATENCIES: Final = (
    ("latency_p50", "p50", "#4477aa"),
    ("latency_p95", "p95", "#ccbb44"),
    ("latency_p99", "p99", "#ee6677"),
)


def draw(rows: Sequence[Scaling], title: str, path: Path) -> None:
    """Write the picture as PNG.

    Raises:
        OSError: It cannot be written.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = [row.replicas for row in rows]
    left.plot(counts, [row.ideal for row in rows], "--", color=_IDEAL, label="ideal")
    left.errorbar(
        counts,
        [row.throughput for row in rows],
        yerr=[
            [row.throughput - row.lowest for row in rows],
            [row.highest - row.throughput for row in rows],
        ],
        marker="o",
        capsize=4,
        color=_MEASURED,
        label="median, lowest to highest",
    )
    for row in rows:
        left.annotate(
            f"{row.efficiency:.0%}",
            (row.replicas, row.throughput),
            textcoords="offset points",
            xytext=(8, -12),
        )
    left.set_ylabel("requests a second")
    for field, name, colour in _LATENCIES:
        values = [getattr(row, field) for row in rows]
        right.plot(counts, values, marker="o", color=colour, label=name)
    right.set_ylabel("latency, seconds")
    for axes in (left, right):
        axes.set_xlabel("replicas")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.margins(x=0.15)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=_DPI)
