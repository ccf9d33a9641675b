"""What came of a sweep: scaling figures of its runs, and a table of them. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


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
