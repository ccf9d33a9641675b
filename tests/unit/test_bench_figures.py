"""The figures of a benchmark and what shows them: fields, percentiles, table, page, picture."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from scripts.serving_bench.figures import figures, summary
from scripts.serving_bench.measurement import Measurement
from scripts.serving_bench.options import read_options
from scripts.serving_bench.report import table, write_report
from scripts.serving_bench.requests import MadeOutput, Reply, RequestResult
from scripts.serving_bench.service_view import ReplicaView
from tests.pictures import size_of

# What vLLM-Omni's client writes; whoever reads its files must find the same here.
REFERENCE_FIELDS = {
    "duration",
    "completed_requests",
    "failed_requests",
    "throughput_qps",
    "latency_mean",
    "latency_median",
    "latency_p50",
    "latency_p95",
    "latency_p99",
    "peak_memory_mb_max",
    "peak_memory_mb_mean",
    "peak_memory_mb_median",
    "stage_durations_mean",
    "stage_durations_p50",
    "stage_durations_p99",
    "slo_attainment_rate",
    "slo_met_success",
    "slo_scale",
    "backend",
    "model",
    "dataset",
    "task",
}


def reply(replica: str | None, run_s: float, **more: Any) -> Reply:
    output = MadeOutput("image/png", b"")
    return Reply((output,), replica=replica, queued_s=0.5, run_s=run_s, started_at=100.5, **more)


def measurement(
    *outcomes: RequestResult, served: dict[str, tuple[int, int]] | None = None
) -> Measurement:
    views = [ReplicaView(f"replica{n}", "ready", (n,), "cpu", 1, 0, 0, 10.0) for n in range(2)]
    return Measurement(
        model="tiny",
        arrivals="all at once",
        started_at=datetime.fromtimestamp(100, UTC),
        epoch_s=100.0,
        duration_s=4.0,
        outcomes=outcomes,
        replicas=tuple(views),
        served=served or {},
        warmup_requests=2,
        client_cpu_share=0.1,
        load=(1.0, 2.0),
    )


def some_outcomes() -> list[RequestResult]:
    return [
        RequestResult(0, 0.0, 0.0, 1.0, 1500, reply("replica0", 0.5, batch_mean=2.0)),
        RequestResult(1, 0.0, 0.0, 2.0, 1500, reply("replica1", 1.5, attempt=2)),
        # Sent late by this client: within its goal from then, and late from its arrival.
        RequestResult(2, 0.0, 1.0, 2.0, 1500, reply("replica0", 1.0, peak_memory_mb=30.0)),
        RequestResult(3, 0.0, 0.0, 0.5, 1500, None, "queue_full", "the line is full"),
    ]


def test_the_figures_hold_the_references_fields_and_add_up() -> None:
    found = figures(measurement(*some_outcomes()), read_options(["--slo"], ""))
    assert found.keys() >= REFERENCE_FIELDS
    assert json.loads(json.dumps(found)) == found
    assert (found["completed_requests"], found["failed_requests"]) == (3, 1)
    assert found["throughput_qps"] == 0.75
    assert found["latency_mean"] == pytest.approx(4 / 3, abs=1e-5)
    assert found["request_errors"] == {"queue_full": 1}
    assert found["first_errors"] == {"queue_full": "the line is full"}
    assert found["slo_met_success"] == 1
    assert found["slo_attainment_rate"] == 0.25
    assert found["queue_time"]["mean"] == 0.5
    assert found["client_wait"]["max"] == 1.0
    assert found["batch_mean"] == 2.0
    assert found["moved_requests"] == 1
    assert found["peak_memory_mb_max"] == 30.0
    assert [row["completed"] for row in found["replicas"]] == [2, 1]
    assert found["requests"][0]["started"] == 0.5


def test_where_replies_name_no_replica_its_own_counter_counts() -> None:
    outcome = RequestResult(0, 0.0, 0.0, 1.0, None, reply(None, 1.0))
    found = figures(measurement(outcome, served={"replica1": (1, 0)}), read_options([], ""))
    assert [row["completed"] for row in found["replicas"]] == [0, 1]
    assert found["replicas"][0]["counted_by"] == "the replicas' counters"
    assert "slo_attainment_rate" not in found


def test_percentiles_are_interpolated_and_nothing_is_zero() -> None:
    found = summary([float(value) for value in range(101)])
    assert (found["p50"], found["p95"], found["p99"], found["max"]) == (50, 95, 99, 100)
    assert summary([1.0, 2.0])["p50"] == 1.5
    assert set(summary([]).values()) == {0.0}


@pytest.mark.parametrize("count", [0, 4])
def test_table_page_and_picture_are_made_of_any_outcome(tmp_path: Path, count: int) -> None:
    failed = RequestResult(0, 0.0, 0.0, 0.5, None, None, "no_answer", "gone")
    found = figures(measurement(*(some_outcomes()[:count] or [failed])), read_options([], ""))
    assert "tiny" in table(found)
    write_report(found, tmp_path / "report.html", "bench <&>")
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert "bench &lt;&amp;&gt;" in page
    assert "<?xml" not in page
    write_report(found, tmp_path / "report.png", "bench")
    assert size_of(tmp_path / "report.png")[0] > 500
