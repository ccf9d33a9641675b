"""The figures as a table for the terminal. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

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
    yield _line("Requests on the way at a time", f"{document['max_concurrency']} at most")
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
        yield _row("  in the replica's line", document["queue_time"])
        yield _row("  running", document["run_time"])
    if document["client_wait"]["max"] > 0.01:
        yield _row("Before: waiting in this client", document["client_wait"])
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
