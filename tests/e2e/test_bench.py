"""The benchmark against a running service: its figures, its warm-up, and what it leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from configs.settings import REPOSITORY
from tests.e2e.service import Service
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

AS_MODULE = ("-m", "scripts.diffusion_benchmark_serving")
AS_FILE = (str(REPOSITORY / "scripts" / "diffusion_benchmark_serving.py"),)
LONG, SHORT = "1000", "4"
RUN_S = 120


def command(service: Service, *arguments: str, how: tuple[str, ...] = AS_MODULE) -> list[str]:
    return [sys.executable, *how, "--base-url", service.url, "--disable-tqdm", *arguments]


def bench(
    service: Service,
    folder: Path,
    *arguments: str,
    how: tuple[str, ...] = AS_MODULE,
    status: int = 0,
) -> Any:
    """Run the benchmark to its end; returns its figures."""
    file = folder / "figures.json"
    done = subprocess.run(
        command(service, "--output-file", str(file), *arguments, how=how),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == status, done.stderr + done.stdout
    return json.loads(file.read_text())


def completed(service: Service) -> dict[str, int]:
    replicas = service.call("GET", "/v1/replicas").json["data"]
    return {replica["name"]: replica["completed"] for replica in replicas}


def test_every_replica_is_warmed_and_then_counted(service: Service, tmp_path: Path) -> None:
    before = completed(service)
    found = bench(
        service,
        tmp_path,
        *("--num-prompts", "6", "--num-inference-steps", SHORT, "--seed", "3", "--slo"),
        *("--save-dir", str(tmp_path / "kept"), "--report", str(tmp_path / "report.html")),
    )
    assert (found["completed_requests"], found["failed_requests"]) == (6, 0)
    counts = {row["name"]: row["completed"] for row in found["replicas"]}
    assert counts.keys() == {"replica0", "replica1"}
    assert sum(counts.values()) == 6
    after = completed(service)
    for name, count in counts.items():
        assert after[name] - before[name] > count, "its warm-up comes on top"
    assert found["run_time"]["min"] > 0
    assert found["batch_mean"] == 1.0
    assert found["stage_durations_mean"].keys() == {"encode", "denoise", "decode", "store"}
    assert 0 <= found["slo_attainment_rate"] <= 1
    assert len(list((tmp_path / "kept").glob("*.png"))) == 6
    with Image.open(tmp_path / "kept" / "00000_0.png") as picture:
        assert picture.size == (64, 64)
    assert "<svg" in (tmp_path / "report.html").read_text()
    listed = service.call("GET", "/v1/requests?limit=100").json["data"]
    mine = [one for one in listed if one["metadata"].get("sent_by")]
    assert not mine, "what it made is removed again"


def test_a_trace_is_replayed_in_its_time(service: Service, tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text(
        'Request(prompt="a red circle", width=64, height=64, num_inference_steps=2, timestamp=5)\n'
        '{"prompt": "a blue star", "width": 32, "height": 32, "timestamp": 6.5, "slo_ms": 60000}\n'
    )
    found = bench(
        service,
        tmp_path,
        *("--dataset", "trace", "--dataset-path", str(trace), "--num-inference-steps", SHORT),
        how=AS_FILE,
    )
    assert found["arrivals"] == "timestamps of the trace"
    assert [row["arrived"] for row in found["requests"]] == [0.0, 1.5]
    assert found["duration"] >= 1.5
    assert found["requests"][1]["sent"] >= 1.5


def test_failures_are_counted_by_code(service: Service, tmp_path: Path) -> None:
    found = bench(
        service,
        tmp_path,
        *("--num-prompts", "2", "--warmup-requests", "0", "--width", "65", "--height", "64"),
        status=1,
    )
    assert found["request_errors"] == {"invalid_parameter": 2}
    assert "width" in found["first_errors"]["invalid_parameter"]


def test_at_most_so_many_requests_are_on_the_way(service: Service, tmp_path: Path) -> None:
    found = bench(
        service,
        tmp_path,
        *("--num-prompts", "4", "--max-concurrency", "1", "--num-inference-steps", SHORT),
    )
    rows = sorted(found["requests"], key=lambda row: row["sent"])
    for earlier, later in pairwise(rows):
        assert later["sent"] >= earlier["done"]
    assert found["client_wait"]["max"] > 0


@pytest.mark.parametrize("backend", ["openai", "vllm-omni"])
@pytest.mark.parametrize("task", ["t2i", "i2i"])
def test_the_calls_of_other_clients_are_measured_too(
    service: Service, tmp_path: Path, backend: str, task: str
) -> None:
    found = bench(
        service,
        tmp_path,
        *("--backend", backend, "--task", task, "--num-prompts", "4", "--num-inference-steps", "2"),
        *("--width", "64", "--height", "64", "--seed", "1", "--save-dir", str(tmp_path / "kept")),
    )
    assert (found["completed_requests"], found["backend"]) == (4, backend)
    assert sum(row["completed"] for row in found["replicas"]) == 4, "by their own counters"
    assert found["stage_durations_mean"]["denoise"] > 0
    assert found["peak_memory_mb_max"] > 0
    for path in (tmp_path / "kept").glob("*.png"):
        with Image.open(path) as picture:
            assert picture.size == (64, 64)
    assert len(list((tmp_path / "kept").iterdir())) == 4


def film_ids(service: Service) -> set[str]:
    return {each["id"] for each in service.call("GET", "/v1/videos?limit=100").json["data"]}


@pytest.mark.parametrize("backend", ["native", "vllm-omni", "v1/videos"])
def test_videos_are_measured_by_every_way_to_ask_for_them(
    film: Service, tmp_path: Path, backend: str
) -> None:
    before = film_ids(film)
    found = bench(
        film,
        tmp_path,
        *(
            "--backend",
            backend,
            "--task",
            "t2v",
            "--num-prompts",
            "2",
            "--num-inference-steps",
            "2",
        ),
        *("--width", "64", "--height", "64", "--num-frames", "9", "--fps", "8"),
        *("--save-dir", str(tmp_path / "kept"), "--poll-interval", "0.2"),
    )
    assert (found["completed_requests"], found["task"]) == (2, "t2v")
    for path in (tmp_path / "kept").iterdir():
        assert path.suffix == ".mp4"
        assert path.read_bytes()[4:8] == b"ftyp"
    assert len(list((tmp_path / "kept").iterdir())) == 2
    if backend == "v1/videos":
        assert film_ids(film) == before, "its jobs are removed again"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_cancels_what_is_on_the_way(
    service: Service, tmp_path: Path, how: signal.Signals
) -> None:
    arguments = ("--num-prompts", "3", "--num-inference-steps", LONG, "--warmup-requests", "0")
    process = subprocess.Popen(
        command(service, *arguments), cwd=REPOSITORY, stdout=subprocess.DEVNULL
    )

    def mine(*states: str) -> list[str]:
        listed = service.call("GET", "/v1/requests?limit=100").json["data"]
        return [
            one["id"]
            for one in listed
            if one["metadata"].get("sent_by") and one["status"] in states
        ]

    try:
        wait_until(lambda: len(mine("queued", "running")) == 3, 30, "its requests")
        ids = mine("queued", "running")
        process.send_signal(how)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: set(ids) <= set(mine("canceled")), 30, "all to be canceled")


def test_a_service_that_is_not_there_is_said_in_a_line() -> None:
    done = subprocess.run(
        [sys.executable, *AS_MODULE, "--port", "1", "--ready-timeout", "0"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: nothing answers at http://localhost:1;")
    assert done.stderr.count("\n") == 1
