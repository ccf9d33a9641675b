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
        efficiency: `throughput` over `ideal`; 1 for the smallest count.
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
    efficiency: float
    latency_p50: float
    latency_p95: float
    latency_p99: float
    run_time: float
    failed: int


def scaling(runs: Sequence[Mapping[str, Any]]) -> list[Scaling]:
    """Return a row for each replica count.

    Args:
        runs: Of each run `replicas` and `figures`, as `figures` returned them.
    """
    counts = sorted({run["replicas"] for run in runs})
    by_count = {
        count: [run["figures"] for run in runs if run["replicas"] == count] for count in counts
    }
    base = median(found["throughput_qps"] for found in by_count[counts[0]]) / counts[0]
    return [_row(count, by_count[count], base * count, base * counts[0]) for count in counts]


def scaling_table(rows: Sequence[Scaling]) -> str:
    """Return the rows as Markdown, which a terminal shows as well."""
    head = (
        "| replicas | requests/s (lowest to highest) | speed-up | efficiency | p50 | p95 | p99 "
        "| run | failed |"
    )
    lines = [
        f"| {row.replicas} | {row.throughput:.3f} ({row.lowest:.3f} to {row.highest:.3f}) "
        f"| {row.speedup:.2f} | {row.efficiency:.0%} | {row.latency_p50:.2f} s "
        f"| {row.latency_p95:.2f} s | {row.latency_p99:.2f} s | {row.run_time:.2f} s "
        f"| {row.failed} |"
        for row in rows
    ]
    return "\n".join([head, "|---" * 9 + "|", *lines])


def _row(count: int, found: Sequence[Mapping[str, Any]], ideal: float, first: float) -> Scaling:
    rates = [one["throughput_qps"] for one in found]
    rate = median(rates)
    return Scaling(
        replicas=count,
        throughput=round(rate, 4),
        lowest=round(min(rates), 4),
        highest=round(max(rates), 4),
        ideal=round(ideal, 4),
        speedup=round(rate / first, 4) if first else 0.0,
        efficiency=round(rate / ideal, 4) if ideal else 0.0,
        latency_p50=_median(found, "latency_p50"),
        latency_p95=_median(found, "latency_p95"),
        latency_p99=_median(found, "latency_p99"),
        run_time=round(median(one["run_time"]["mean"] for one in found), 4),
        failed=sum(one["failed_requests"] for one in found),
    )


def _median(found: Sequence[Mapping[str, Any]], name: str) -> float:
    values: list[float] = [one[name] for one in found]
    return round(median(values), 4)
