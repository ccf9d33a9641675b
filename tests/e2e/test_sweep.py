"""The sweep: a service for each replica count, the same prompts, a picture; nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from configs.settings import REPOSITORY
from tests.e2e.started import started_in
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SWEEP = (sys.executable, "-m", "scripts.sweep")
RUN_S, START_S, END_S = 240, 90, 40


def test_each_count_is_measured_with_the_same_requests(
    own_environ: dict[str, str], tmp_path: Path
) -> None:
    arguments = ("--replicas", "2,1", "--num-prompts", "4", "--num-inference-steps", "2")
    done = subprocess.run(
        [*SWEEP, *arguments, "--disable-tqdm", "--output-dir", str(tmp_path / "results")],
        cwd=REPOSITORY,
        env=own_environ,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads((tmp_path / "results" / "sweep.json").read_text())
    assert [row["replicas"] for row in found["scaling"]] == [1, 2]
    assert [row["failed"] for row in found["scaling"]] == [0, 0]
    one, two = found["scaling"]
    assert (one["efficiency"], one["speedup"]) == (1.0, 1.0)
    assert two["ideal"] == pytest.approx(2 * one["throughput"], rel=1e-3)
    assert two["efficiency"] == pytest.approx(two["throughput"] / two["ideal"], rel=1e-3)
    for run in found["runs"]:
        assert run["figures"]["completed_requests"] == 4
        assert run["figures"]["seed"] == 0
        assert sum(row["completed"] for row in run["figures"]["replicas"]) == 4
        assert len(run["figures"]["replicas"]) == run["replicas"]
    with Image.open(tmp_path / "results" / "sweep.png") as picture:
        assert picture.size == (900, 400)
    assert "| 2 |" in done.stdout
    assert not list(started_in(tmp_path))
    assert not list((tmp_path / "temp").glob("diffusion-[!r]*"))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(
    own_environ: dict[str, str], tmp_path: Path, how: signal.Signals
) -> None:
    arguments = ("--replicas", "1", "--output-dir", str(tmp_path / "results"))
    process = subprocess.Popen([*SWEEP, *arguments], cwd=REPOSITORY, env=own_environ)
    try:
        # Redis, API, Flower, the replica and their launcher.
        wait_until(lambda: len(list(started_in(tmp_path / "temp"))) >= 5, START_S, "the service")
        process.send_signal(how)
        assert process.wait(END_S) == 130
    finally:
        process.kill()
        process.wait()
    assert not list(started_in(tmp_path / "temp"))
    assert not list((tmp_path / "temp").glob("diffusion-[!r]*"))


def refused(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [*SWEEP, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    return done.returncode, done.stderr


def test_more_replicas_than_devices_are_refused_in_a_line() -> None:
    status, said = refused("--replicas", "1,2,3,4", "--stage-configs-path", "configs/tiny_cpu.yaml")
    assert status == 1
    assert said == (
        "Error: 4 replicas need 4 devices (1 each), but runtime.devices of configs/tiny_cpu.yaml "
        "names 2 (0,1); use --replicas up to 2, or name more devices there\n"
    )


def test_flags_that_are_the_sweeps_own_are_refused() -> None:
    status, said = refused("--replicas", "1", "--base-url=http://localhost:1")
    assert status == 2
    assert "--base-url is set by the sweep; leave it out" in said
