"""Replicas by their bare command line: how they are named, fail, stop, die and come back."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

from configs.settings import REPOSITORY
from tests.e2e.service import Service
from tests.waiting import wait_until

LONG = 900


def test_the_bare_line_makes_two_addressable_replicas(service: Service) -> None:
    replicas = service.call("GET", "/v1/replicas").json["data"]
    assert [(r["name"], r["state"], r["devices"], r["capacity"]) for r in replicas] == [
        ("replica0", "ready", [0], 1),
        ("replica1", "ready", [1], 1),
    ]
    inspect = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "workers", "inspect", "stats", "-j"],
        cwd=REPOSITORY,
        env={
            "PATH": "/usr/bin:/bin",
            "REDIS_URL": service.redis_url,
            "REDIS_PREFIX": service.redis_prefix,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert '"replica0@' in inspect.stdout
    assert '"replica1@' in inspect.stdout
    assert "celery.concurrency.thread:TaskPool" in inspect.stdout


def test_what_a_killed_and_a_stuck_replica_had_goes_on_on_the_other(service: Service) -> None:
    """The one that comes back after the kill is stuck soon: a step takes longer than it may."""
    fields: dict[str, Any] = {"seed": 6, "num_inference_steps": 150}
    reference = service.ended(service.submit(**fields)["id"])
    request = service.submit_to("replica0", "a red circle on a blue background", **fields)
    service.at_step(request["id"], 1)
    restarts = service.call("GET", "/v1/replicas/replica0").json["restarts"]
    service.end("replica0", signal.SIGKILL)
    ended = service.ended(request["id"])
    assert (ended["status"], ended["replica"], ended["attempt"]) == ("succeeded", "replica1", 2)
    assert service.output(ended).content == service.output(reference).content
    assert service.files(request["id"]) == ["2-0.png"]
    assert service.call("GET", "/v1/replicas/replica0").json["state"] == "gone"
    assert service.call("GET", "/ready").status == 200

    service.start_replica("replica0", {"STUCK_AFTER_S": "0.3"})
    assert service.wait_for("replica0", "ready")["restarts"] == restarts + 1
    request = service.submit_to("replica0", "a red circle", width=768, height=768)
    assert service.processes["replica0"].wait(60) == -signal.SIGKILL
    replica = service.call("GET", "/v1/replicas/replica0").json
    assert replica["state"] == "failed"
    assert "STUCK_AFTER_S" in replica["error"]
    assert request["id"] in replica["error"]
    wait_until(
        lambda: service.get(request["id"])["replica"] == "replica1", 20, "the request to move"
    )
    service.call("POST", f"/v1/requests/{request['id']}/cancel")
    ended = service.ended(request["id"])
    assert (ended["status"], ended["attempt"]) == ("canceled", 2)
    # What waits for a busy one is taken by one that joins, as soon as it has.
    busy = service.submit("a red circle", num_inference_steps=LONG)
    waiting = service.submit("a blue star", seed=6)
    service.at_step(busy["id"], 1)
    assert waiting["replica"] == "replica1"
    stolen = service.call("GET", "/v1/replicas/replica0").json["stolen"]
    service.start_replica("replica0")
    ended = service.ended(waiting["id"])
    assert (ended["status"], ended["replica"], ended["attempt"]) == ("succeeded", "replica0", 1)
    assert service.call("GET", "/v1/replicas/replica0").json["stolen"] == stolen + 1
    service.call("DELETE", f"/v1/requests/{busy['id']}")
    service.wait_for("replica0", "ready")


def test_what_waits_for_a_slow_replica_is_taken_by_one_that_returns_and_goes_on_with_the_rest(
    service: Service,
) -> None:
    service.call("POST", "/v1/replicas/replica1/drain")
    slow = service.submit("a red circle", num_inference_steps=LONG)
    waiting = [service.submit("a blue star", seed=6) for _ in range(4)]
    service.at_step(slow["id"], 1)
    service.call("POST", "/v1/replicas/replica1/resume")
    ended = [service.ended(each["id"]) for each in waiting]
    assert {(each["status"], each["replica"], each["attempt"]) for each in ended} == {
        ("succeeded", "replica1", 1)
    }
    assert service.get(slow["id"])["status"] == "running"
    service.call("DELETE", f"/v1/requests/{slow['id']}")
    own = service.ended(service.submit_to("replica0", "a blue star", seed=6)["id"])
    assert {service.output(each).content for each in (own, *ended)} == {service.output(own).content}


def test_a_drained_replica_gets_nothing_until_it_is_resumed(service: Service) -> None:
    answer = service.call("POST", "/v1/replicas/replica0/drain")
    assert (answer.status, answer.json["state"]) == (200, "draining")
    assert {service.submit()["replica"] for _ in range(3)} == {"replica1"}
    assert service.call("POST", "/v1/replicas/replica0/resume").json["state"] == "ready"
    assert {service.submit()["replica"] for _ in range(2)} == {"replica0", "replica1"}
    assert service.call("POST", "/v1/replicas/replica9/drain").status == 404


def refusal(queue: str, status: int, environ: dict[str, str] | None = None) -> tuple[str, str]:
    """Start a worker that must not start; returns the one line that says why, and all it said."""
    refused = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "workers", "worker", "-Q", queue],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == status, refused.stderr
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("Error:")]
    return line, refused.stderr


def test_a_queue_that_is_no_replica_is_refused_in_one_line() -> None:
    for queue, words in (
        ("celery", "does not name one replica"),
        ("replica7", "use replica0 or replica1"),
    ):
        line, said = refusal(queue, 2)
        assert words in line
        assert "Traceback" not in said


def test_a_fault_of_the_start_ends_the_worker_instead_of_half_a_replica() -> None:
    environ = {"PATH": "/usr/bin:/bin", "OUTPUTS_URL": "nowhere://bucket"}
    line, _ = refusal("replica0", 1, environ)
    assert "nowhere" in line


def test_nothing_is_left_in_celerys_hands_when_all_is_done(service: Service) -> None:
    ended = [service.submit() for _ in range(4)]
    for request in ended:
        service.ended(request["id"])
    wait_until(
        lambda: all(
            (r["waiting"], r["running"]) == (0, 0)
            for r in service.call("GET", "/v1/replicas").json["data"]
        ),
        10,
        "both replicas to be idle",
    )
