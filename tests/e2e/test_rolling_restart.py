"""Restarts by the API: one by one nothing fails; what does not come back stops the roll."""

from __future__ import annotations

import signal
import subprocess

import pytest

from configs.settings import REPOSITORY
from tests.e2e.launcher import roll_command, roll_replicas
from tests.e2e.service import Service
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LONG = 900
STOPPING = "Warm shutdown"


def test_a_replica_that_does_not_come_back_stops_the_roll_and_the_rest_serves(
    service: Service,
) -> None:
    """Nobody supervises these workers."""
    roll = roll_replicas(service.url, "--drain-s", "0", "--timeout", "4")
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
    refused = roll_replicas(service.url, "replica0")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "replica0 is the only ready replica of stage 0 (tiny)" in refused.stderr
    assert refused.stderr.count("\n") == 1
    running, waiting = service.submit(num_inference_steps=300), service.submit()
    service.at_step(running["id"], 1)
    roll = subprocess.Popen(
        roll_command(service.url, "replica0", "--force", "--drain-s", "0", "--timeout", "90"),
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
        refused = roll_replicas(service.url, *arguments)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert "from 0 to 86400" in roll_replicas(service.url, "--drain-s", "-1").stderr
    assert "API_PORT" in roll_replicas(service.url, API_PORT="x").stderr


def test_a_drain_hands_back_what_takes_too_long_and_the_replica_lives_on(service: Service) -> None:
    request = service.submit_to("replica0", "a blue star", num_inference_steps=200, seed=5)
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
    assert {service.submit()["replica"] for _ in range(2)} == {"replica0", "replica1"}


def test_a_drain_with_time_enough_lets_the_run_end(service: Service) -> None:
    request = service.submit_to("replica0", "a blue star", num_inference_steps=100)
    service.at_step(request["id"], 1)
    service.call("POST", "/v1/replicas/replica0/drain?drain_s=60")
    ended = service.ended(request["id"])
    service.call("POST", "/v1/replicas/replica0/resume")
    assert (ended["status"], ended["replica"], ended["attempt"]) == ("succeeded", "replica0", 1)


def test_a_stop_hurries_a_restart_that_gave_more_time(service: Service) -> None:
    """The supervisor's SIGTERM counts, with DRAIN_S, though the restart allowed ten minutes."""
    request = service.submit_to("replica0", "a blue star", num_inference_steps=LONG)
    service.at_step(request["id"], 1)
    stops = service.whole_log("replica0").count(STOPPING)
    service.call("POST", "/v1/replicas/replica0/restart?drain_s=600")
    service.wait_for("replica0", "draining")
    wait_until(
        lambda: service.whole_log("replica0").count(STOPPING) > stops, 20, "the first signal"
    )
    assert service.end("replica0", signal.SIGTERM, timeout_s=15) == 0
    moved = service.get(request["id"])
    assert (moved["replica"], moved["attempt"]) == ("replica1", 2)
    assert service.call("GET", "/v1/replicas/replica0").json["state"] == "gone"
    service.call("POST", f"/v1/requests/{request['id']}/cancel")
    assert service.ended(request["id"])["status"] == "canceled"
    service.start_replica("replica0")
    service.wait_for("replica0", "ready")
