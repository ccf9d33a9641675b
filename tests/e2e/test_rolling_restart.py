"""Restarts by the API: one by one nothing fails; what does not come back stops the roll."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from configs.settings import REPOSITORY
from tests.e2e.launcher import Launcher
from tests.e2e.service import Service
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LONG = 900
CLIENTS = 4


def _command(url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "scripts.rolling_restart", "--url", url, *arguments]


def _roll(url: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(url, *arguments),
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def launcher(redis_binary: str, tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, HEARTBEAT_S="0.5", LOG_LEVEL="INFO")
    try:
        launcher.start()
        yield launcher
    finally:
        launcher.close()


def test_all_replicas_are_replaced_under_load_and_no_request_fails(launcher: Launcher) -> None:
    before = {name: launcher.replica(name) for name in ("replica0", "replica1")}
    rolled = threading.Event()

    def client(number: int) -> list[dict[str, Any]]:
        """Submit one after the other, as long as the roll goes on; any refusal raises."""
        ended = []
        while not rolled.is_set():
            prompt = "a red circle on a blue background"
            steps = LONG if number == 0 else 20
            body = {"prompt": prompt, "seed": number, "num_inference_steps": steps}
            ended.append(launcher.call("/v1/requests", body, wait_s=60))
        return ended

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            roll = _roll(launcher.url, "--drain-s", "0.5", "--timeout", "120")
        finally:
            rolled.set()
        answers = [answer for done in clients for answer in done.result()]
    assert roll.returncode == 0, (roll.stdout, roll.stderr)
    for name in before:
        assert f"{name}: restarting" in roll.stdout
        assert f"{name}: its new process is ready, after " in roll.stdout
    assert roll.stdout.index("replica0: its new process is ready") < roll.stdout.index("replica1:")
    assert "restarted 2 in " in roll.stdout
    ended = [launcher.ended(answer["id"]) for answer in answers]
    assert {(request["status"], request["error"]) for request in ended} == {("succeeded", None)}
    assert len(ended) > CLIENTS  # somebody came again while the replicas were replaced
    assert {launcher.crashes(request["id"]) for request in ended} == {0}
    for name, old in before.items():
        new = launcher.replica(name)
        assert (new["state"], new["restarts"]) == ("ready", old["restarts"] + 1)
        assert new["pid"] != old["pid"]
        launcher.wait_for(f"{name} ended with code 0")


def test_a_replica_that_does_not_come_back_stops_the_roll_and_the_rest_serves(
    service: Service,
) -> None:
    """Nobody supervises these workers."""
    roll = _roll(service.url, "--drain-s", "0", "--timeout", "4")
    assert roll.returncode == 1
    assert "replica0: its process has ended" in roll.stdout
    assert "replica1:" not in roll.stdout
    assert "Error: replica0 was not ready again within 4 s" in roll.stderr
    assert "The other replicas were not restarted." in roll.stderr
    assert "Traceback" not in roll.stderr
    assert service.processes["replica0"].wait(15) == 0
    assert service.ended(service.submit()["id"])["replica"] == "replica1"
    service.start_replica("replica0")
    service.wait_for("replica0", "ready")


def test_the_only_ready_replica_goes_by_force_alone_and_what_it_had_waits(
    service: Service,
) -> None:
    service.call("POST", "/v1/replicas/replica1/drain")
    refused = _roll(service.url, "replica0")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "replica0 is the only ready replica of stage 0 (tiny)" in refused.stderr
    assert refused.stderr.count("\n") == 1
    running, waiting = service.submit(num_inference_steps=LONG), service.submit()
    service.at_step(running["id"], 1)
    roll = subprocess.Popen(
        _command(service.url, "replica0", "--force", "--drain-s", "0", "--timeout", "90"),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert service.processes["replica0"].wait(60) == 0
        service.start_replica("replica0")
        said, _ = roll.communicate(timeout=90)
    finally:
        roll.kill()
    assert roll.returncode == 0, said
    for request in (running, waiting):
        ended = service.ended(request["id"])
        assert (ended["status"], ended["replica"]) == ("succeeded", "replica0")
    service.call("POST", "/v1/replicas/replica1/resume")


def test_what_cannot_be_rolled_is_said_in_one_line(service: Service) -> None:
    for arguments, words in (
        (("replica7",), "replica7 is not a replica; use replica0 or replica1"),
        (("--url", "http://127.0.0.1:9"), "http://127.0.0.1:9 does not answer"),
    ):
        refused = _roll(service.url, *arguments)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert "from 0 to 86400" in _roll(service.url, "--drain-s", "-1").stderr
    assert "API_PORT" in _roll(service.url, API_PORT="x").stderr


def test_a_drain_hands_back_what_takes_too_long_and_the_replica_lives_on(service: Service) -> None:
    request = service.submit_to("replica0", "a blue star", num_inference_steps=LONG, seed=5)
    service.at_step(request["id"], 1)
    service.call("POST", "/v1/replicas/replica0/drain?drain_s=0.2")
    moved = wait_until(
        lambda: (now := service.get(request["id"]))["replica"] == "replica1" and now, 20, "a move"
    )
    assert moved["attempt"] == 2
    drained = service.wait_for("replica0", "draining")
    assert (drained["running"], drained["restarts"]) == (0, drained["restarts"])
    ended = service.ended(request["id"])
    assert (ended["status"], ended["attempt"]) == ("succeeded", 2)
    assert service.files(request["id"]) == ["2-0.png"]
    service.call("POST", "/v1/replicas/replica0/resume")
    assert {service.ended(service.submit()["id"])["replica"] for _ in range(2)} == {
        "replica0",
        "replica1",
    }


def test_a_drain_with_time_enough_lets_the_run_end(service: Service) -> None:
    request = service.submit_to("replica0", "a blue star", num_inference_steps=300)
    service.at_step(request["id"], 1)
    service.call("POST", "/v1/replicas/replica0/drain?drain_s=60")
    ended = service.ended(request["id"])
    service.call("POST", "/v1/replicas/replica0/resume")
    assert (ended["status"], ended["replica"], ended["attempt"]) == ("succeeded", "replica0", 1)


def test_a_stop_hurries_a_restart_that_gave_more_time(service: Service) -> None:
    """The supervisor's SIGTERM counts, with DRAIN_S, though the restart allowed ten minutes."""
    request = service.submit_to("replica0", "a blue star", num_inference_steps=LONG)
    service.at_step(request["id"], 1)
    service.call("POST", "/v1/replicas/replica0/restart?drain_s=600")
    service.wait_for("replica0", "draining")
    wait_until(
        lambda: "Warm shutdown" in (service.folder / "replica0.log").read_text(), 20, "the first"
    )
    assert service.end("replica0", signal.SIGTERM, timeout_s=15) == 0
    assert service.get(request["id"])["attempt"] == 2
    service.call("POST", f"/v1/requests/{request['id']}/cancel")
    service.start_replica("replica0")
    service.wait_for("replica0", "ready")
