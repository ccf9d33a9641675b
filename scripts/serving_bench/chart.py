"""The picture of a measurement: who worked when, and how the latencies spread.

Draws without a screen. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_REPLICA_COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
_WAITING: Final = "#dddddd"
_FAILED: Final = "#222222"
_MOST_BARS: Final = 400


def chart(document: Mapping[str, Any]) -> Figure:
    """Return the picture of what `figures` returned."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    timeline, spread = figure.subplots(2, 1, height_ratios=(3, 2))
    _draw_timeline(timeline, document)
    _draw_spread(spread, document)
    figure.suptitle(
        f"{document['model']}: {document['throughput_qps']:.2f} requests/s, "
        f"p50 {document['latency_p50']:.2f} s, p99 {document['latency_p99']:.2f} s"
    )
    return figure


def _draw_timeline(axes: Axes, document: Mapping[str, Any]) -> None:
    """A bar for each request: grey while it waits, then in the colour of its replica."""
    rows = document["requests"][:_MOST_BARS]
    names = [replica["name"] for replica in document["replicas"]]
    for place, row in enumerate(rows):
        started = row["started"] if row["started"] is not None else row["sent"]
        axes.barh(place, started - row["arrived"], left=row["arrived"], height=0.8, color=_WAITING)
        colour = _FAILED if row["error"] else _colour(row["replica"], names)
        ended = started + row["run_time"] if row["run_time"] is not None else row["done"]
        axes.barh(place, ended - started, left=started, height=0.8, color=colour)
    labels = [name for name in names if any(row["replica"] == name for row in rows)]
    for name in labels:
        axes.barh(0, 0, color=_colour(name, names), label=name)
    axes.barh(0, 0, color=_WAITING, label="waiting")
    if document["failed_requests"]:
        axes.barh(0, 0, color=_FAILED, label="failed")
    axes.legend(loc="best", fontsize="small")
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    left_out = len(document["requests"]) - len(rows)
    axes.set_title("Requests in time" + (f" (the first {len(rows)})" if left_out else ""))
    axes.set_xlabel("seconds")
    axes.set_ylabel("request")


def _draw_spread(axes: Axes, document: Mapping[str, Any]) -> None:
    latencies = sorted(row["latency"] for row in document["requests"] if not row["error"])
    shares = [100 * (place + 1) / len(latencies) for place in range(len(latencies))]
    axes.step([0.0, *latencies], [0.0, *shares], where="post", color=_REPLICA_COLOURS[0])
    for name in ("p50", "p95", "p99"):
        value = document[f"latency_{name}"]
        axes.axvline(value, color="#999999", linewidth=0.8)
        axes.annotate(name, (value, 2), fontsize="small", rotation=90, va="bottom", ha="right")
    axes.set_title("Latency")
    axes.set_xlabel("seconds")
    axes.set_ylabel("% of requests at most")
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)


def _colour(name: str | None, names: list[str]) -> str:
    if name not in names:
        return _REPLICA_COLOURS[0]
    return _REPLICA_COLOURS[names.index(name) % len(_REPLICA_COLOURS)]
