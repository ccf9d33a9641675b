"""The picture of a sweep: throughput and latency against replicas. Draws without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scripts.scaling.results import Scaling

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
