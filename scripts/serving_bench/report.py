"""The figures as a table for the terminal, as a picture, and as a page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from string import Template
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


_WIDTH: Final = 72
_LABEL: Final = 36


def table(document: Mapping[str, Any]) -> str:
    """Return the table of what `figures` returned."""
    title = " Serving benchmark "
    return "\n".join([title.center(_WIDTH, "="), *_lines(document), "=" * _WIDTH])


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    total = document["completed_requests"] + document["failed_requests"]
    yield _line("Model", document["model"])
    yield _line("Backend, data set, task", _joined(document, "backend", "dataset", "task"))
    yield _line("Arrivals", document["arrivals"])
    yield _line("Requests in flight", f"{document['max_concurrency']} at most")
    yield _line("Warm-up requests", document["warmup_requests"])
    yield _rule()
    yield _line("Duration", f"{document['duration']:.2f} s")
    yield _line("Succeeded", f"{document['completed_requests']} of {total}")
    for code, count in document["request_errors"].items():
        yield _line(f"  failed: {code}", count)
        yield f"    {document['first_errors'][code][: 2 * _WIDTH]}"
    yield _line("Throughput", f"{document['throughput_qps']:.3f} requests/s")
    if document["outputs"] != document["completed_requests"]:
        yield _line("Outputs", f"{document['outputs_per_second']:.3f} outputs/s")
    yield _rule()
    yield f"{'seconds':<{_LABEL}}{'mean':>9}{'p50':>9}{'p95':>9}{'p99':>9}"
    latency = {name: document[f"latency_{name}"] for name in ("mean", "p50", "p95", "p99")}
    yield _row("Latency", latency)
    if document["queue_time"]["max"]:
        yield _row("  waiting for the replica", document["queue_time"])
        yield _row("  running", document["run_time"])
    if document["client_wait"]["max"] > 0.01:
        yield _row("  waiting in this client", document["client_wait"])
    for name, mean in document["stage_durations_mean"].items():
        yield _line(f"  {name}, mean", f"{mean:.3f} s")
    if document["batch_mean"] is not None:
        yield _line("Requests in a denoiser call", f"{document['batch_mean']:.2f}")
    if document["moved_requests"]:
        yield _line("Moved to another replica", document["moved_requests"])
    if "slo_attainment_rate" in document:
        yield _rule()
        yield _line("Met their latency goal", f"{document['slo_attainment_rate']:.1%}")
        yield _line("Goal, median", f"{document['slo_ms_median']:.0f} ms")
    if document["peak_memory_mb_max"]:
        yield _line("Peak memory, largest", f"{document['peak_memory_mb_max']:.0f} MiB")
    yield from _replica_lines(document)


def _replica_lines(document: Mapping[str, Any]) -> Iterator[str]:
    if not document["replicas"]:
        return
    yield _rule()
    names = f"{'completed':>10}{'run mean':>10}{'busy':>7}{'memory':>11}"
    yield f"{'replica':<14}{'devices':<12}{names}"
    for row in document["replicas"]:
        where = f"{row['device_kind'] or ''} {','.join(map(str, row['devices']))}"
        run = f"{row['run_time_mean']:.3f}" if row["run_time_mean"] is not None else "-"
        busy = f"{row['requests_running_mean']:.2f}" if row["run_time_mean"] is not None else "-"
        memory = f"{row['memory_mb']:.0f} MiB" if row["memory_mb"] else "-"
        yield f"{row['name']:<14}{where:<12}{row['completed']:>10}{run:>10}{busy:>7}{memory:>11}"


def _joined(document: Mapping[str, Any], *names: str) -> str:
    return ", ".join(str(document[name]) for name in names)


def _line(label: str, value: Any) -> str:
    return f"{label:<{_LABEL}}{value}"


def _row(label: str, values: Mapping[str, float]) -> str:
    cells = "".join(f"{values[name]:>9.3f}" for name in ("mean", "p50", "p95", "p99"))
    return f"{label:<{_LABEL}}{cells}"


def _rule() -> str:
    return "-" * _WIDTH


_DPI: Final = 110
_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Benchmark of $model</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }
  pre { overflow-x: auto; background: #f4f4f4; padding: 1rem; line-height: 1.3 }
  svg { max-width: 100%; height: auto }
</style>
<h1>Benchmark of $model</h1>
<p>$when; load average of the client's machine $load;
$cpu of one core went to the client itself.</p>
$picture
<h2>Figures</h2>
<pre>$table</pre>
<h2>Command</h2>
<pre>$command</pre>
</html>
""")


def write_report(document: Mapping[str, Any], path: Path, command: str) -> None:
    """Write the report of what `figures` returned; the name's end says which kind.

    Args:
        document: The figures.
        path: Ends in `.html` or `.png`.
        command: The command line that made them.

    Raises:
        OSError: It cannot be written.
    """
    if path.suffix == ".png":
        chart(document).savefig(path, dpi=_DPI)
        return
    environment = document["environment"]
    path.write_text(
        _PAGE.substitute(
            model=escape(document["model"]),
            when=escape(environment["started_at"]),
            load=" and ".join(f"{value:.2f}" for value in environment["load_average"]),
            cpu=f"{environment['client_cpu_share']:.0%}",
            picture=_svg(document),
            table=escape(table(document)),
            command=escape(command),
        ),
        encoding="utf-8",
    )


def _svg(document: Mapping[str, Any]) -> str:
    """The picture as an element of the page, without the head of an XML file."""
    drawn = io.StringIO()
    chart(document).savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]
