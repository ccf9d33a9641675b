"""The figures of a measurement: the fields of vLLM-Omni's JSON, and ours beside them.

Times are in seconds unless a name says otherwise. Percentiles are interpolated linearly. Where
nothing succeeded a latency is 0, as in the reference. docs/benchmarks.md explains each field.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from scripts.serving_bench.measurement import Measurement
from scripts.serving_bench.options import Options
from scripts.serving_bench.requests import Reply, RequestResult

_DIGITS: Final = 6


def figures(measured: Measurement, options: Options) -> dict[str, Any]:
    """Return all figures as one JSON document."""
    good = [one for one in measured.outcomes if one.reply is not None]
    replies = [one.reply for one in good if one.reply is not None]
    latencies = [one.latency_s for one in good]
    outputs = sum(len(reply.outputs) for reply in replies)
    document = {
        "duration": measured.duration_s,
        "completed_requests": len(good),
        "failed_requests": len(measured.outcomes) - len(good),
        "throughput_qps": len(good) / measured.duration_s,
        **{f"latency_{name}": value for name, value in summary(latencies).items()},
        **_memory(replies),
        **_stages(replies),
        **_goals(measured.outcomes, options),
        "backend": options.backend,
        "model": measured.model,
        "dataset": options.dataset,
        "task": options.task,
        "outputs": outputs,
        "outputs_per_second": outputs / measured.duration_s,
        "arrivals": measured.arrivals,
        "max_concurrency": options.max_concurrency or len(measured.outcomes),
        "request_errors": dict(
            Counter(one.error_code for one in measured.outcomes if one.error_code)
        ),
        "first_errors": _first_errors(measured.outcomes),
        "client_wait": summary([one.sent_s - one.arrived_s for one in good]),
        "queue_time": summary(_given(reply.queued_s for reply in replies)),
        "run_time": summary(_given(reply.run_s for reply in replies)),
        "batch_mean": _mean(_given(reply.batch_mean for reply in replies)),
        "moved_requests": sum(reply.attempt > 1 for reply in replies),
        "replicas": _replicas(measured),
        "warmup_requests": measured.warmup_requests,
        "parameters": dict(options.parameters),
        "seed": options.seed,
        "environment": _environment(measured),
        "requests": [_row(one, measured.epoch_s) for one in measured.outcomes],
    }
    rounded: dict[str, Any] = _rounded(document)
    return rounded


def _environment(measured: Measurement) -> dict[str, Any]:
    return {
        "started_at": measured.started_at.isoformat(timespec="seconds"),
        "client_cpu_share": measured.client_cpu_share,
        "load_average": list(measured.load),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median and percentiles; all 0 where there is no value."""
    found = np.asarray(values or [0.0], dtype=float)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(found, [50, 90, 95, 99]))
    return {
        "mean": float(found.mean()),
        "median": p50,
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "min": float(found.min()),
        "max": float(found.max()),
    }


def _memory(replies: Sequence[Reply]) -> dict[str, float]:
    peaks = _given(reply.peak_memory_mb for reply in replies)
    found = summary(peaks)
    return {f"peak_memory_mb_{name}": found[name] for name in ("max", "mean", "median")}


def _stages(replies: Sequence[Reply]) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(name for reply in replies for name in reply.stage_durations)
    by_stage = {
        name: summary(_given(reply.stage_durations.get(name) for reply in replies))
        for name in names
    }
    return {
        f"stage_durations_{part}": {name: found[part] for name, found in by_stage.items()}
        for part in ("mean", "p50", "p99")
    }


def _goals(outcomes: Sequence[RequestResult], options: Options) -> dict[str, Any]:
    if not options.slo and options.slo_ms is None:
        return {}
    verdicts = [one.met_slo for one in outcomes if one.met_slo is not None]
    return {
        "slo_attainment_rate": sum(verdicts) / len(verdicts) if verdicts else 0.0,
        "slo_met_success": sum(verdicts),
        "slo_scale": options.slo_scale,
        "slo_ms_median": float(np.median([one.slo_ms for one in outcomes if one.slo_ms] or [0.0])),
    }


def _replicas(measured: Measurement) -> list[dict[str, Any]]:
    """What each replica did, by the replies that name one, else by the replicas' own counters."""
    by_name: dict[str, list[Reply]] = {view.name: [] for view in measured.replicas}
    for one in measured.outcomes:
        if one.reply is not None and one.reply.replica is not None:
            by_name.setdefault(one.reply.replica, []).append(one.reply)
    named = any(by_name.values())
    views = {view.name: view for view in measured.replicas}
    rows = []
    for name, replies in by_name.items():
        view, counted = views.get(name), measured.served.get(name, (0, 0))
        busy = sum(_given(reply.run_s for reply in replies))
        rows.append(
            {
                "name": name,
                "devices": list(view.devices) if view else [],
                "device_kind": view.device_kind if view else None,
                "memory_mb": view.memory_mb if view else None,
                "completed": len(replies) if named else counted[0],
                "failed": counted[1],
                "counted_by": "replies" if named else "the replicas' counters",
                "run_time_mean": _mean(_given(reply.run_s for reply in replies)),
                "batch_mean": _mean(_given(reply.batch_mean for reply in replies)),
                "requests_running_mean": busy / measured.duration_s,
            }
        )
    return rows


def _first_errors(outcomes: Sequence[RequestResult]) -> dict[str, str]:
    """For each code the first message, since a count alone fixes nothing."""
    found: dict[str, str] = {}
    for one in outcomes:
        if one.error_code is not None:
            found.setdefault(one.error_code, one.error_message)
    return found


def _row(one: RequestResult, epoch_s: float) -> dict[str, Any]:
    reply = one.reply
    started = reply.started_at - epoch_s if reply and reply.started_at else None
    return {
        "index": one.index,
        "arrived": one.arrived_s,
        "sent": one.sent_s,
        "started": started,
        "done": one.done_s,
        "latency": one.latency_s,
        "replica": reply.replica if reply else None,
        "run_time": reply.run_s if reply else None,
        "batch_mean": reply.batch_mean if reply else None,
        "error": one.error_code,
        "slo_ms": one.slo_ms,
    }


def _given(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _rounded(value: Any) -> Any:
    """The document without digits that no clock has."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return value
