"""A client that goes takes its request with it; clients that wait take nothing from the others."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.e2e.service import Service
from tests.waiting import wait_until

LONG = 900  # steps: some seconds on the bundled model
WAITING = 200
AT_ONCE = 20


def send(service: Service, path: str, **body: object) -> socket.socket:
    """Make a call and leave its answer unread."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=30)
    connection.sendall(head.encode() + data)
    return connection


def newest(service: Service, mark: str) -> Any:
    """The request of that mark, once it is there."""

    def look() -> Any:
        listed = service.call("GET", "/v1/requests?limit=100").json["data"]
        return next((each for each in listed if each["metadata"].get("mark") == mark), None)

    return wait_until(look, 20, f"the request {mark}")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("images/generations", {"prompt": "a red circle"}),
        ("images/generations", {"prompt": "a red circle", "stream": True, "partial_images": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a red circle"}]}),
    ],
)
def test_a_client_that_goes_cancels_its_running_request(
    service: Service, path: str, fields: dict[str, object]
) -> None:
    mark = secrets.token_hex(4)
    connection = send(
        service, f"/v1/{path}", **fields, num_inference_steps=LONG, metadata={"mark": mark}
    )
    request = service.at_step(newest(service, mark)["id"], 5)
    connection.close()
    ended = service.ended(request["id"])
    assert ended["status"] == "canceled"
    assert ended["progress"]["step"] < LONG


def test_a_client_that_goes_cancels_its_waiting_request(service: Service) -> None:
    running = [service.submit(num_inference_steps=LONG)["id"] for _ in range(4)]
    mark = secrets.token_hex(4)
    connection = send(
        service, "/v1/images/generations", prompt="a", priority="low", metadata={"mark": mark}
    )
    request = newest(service, mark)
    connection.close()
    assert service.ended(request["id"])["status"] == "canceled"
    for request_id in running:
        service.call("POST", f"/v1/requests/{request_id}/cancel")


def test_with_a_key_of_its_own_a_request_outlives_its_client(service: Service) -> None:
    mark = secrets.token_hex(4)
    data = json.dumps({"prompt": "a", "num_inference_steps": 60, "metadata": {"mark": mark}})
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=30)
    connection.sendall(
        (
            "POST /v1/images/generations HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nIdempotency-Key: {mark}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n{data}"
        ).encode()
    )
    request = newest(service, mark)
    connection.close()
    assert service.ended(request["id"])["status"] == "succeeded"


def test_two_calls_with_one_key_wait_for_one_request(service: Service) -> None:
    body = {"prompt": "a", "num_inference_steps": 60}
    key = {"Idempotency-Key": secrets.token_hex(4)}
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(service.call, "POST", "/v1/images/generations", body, key) for _ in range(2)
        ]
        answers = [call.result() for call in calls]
    assert [answer.status for answer in answers] == [200, 200], answers
    assert answers[0].json["id"] == answers[1].json["id"]


@pytest.fixture
def patient_api(service: Service, tmp_path: Path) -> Iterator[Service]:
    """An API of one process and long queues, before the same replicas; the second is drained."""
    own = Service(
        service.redis_url,
        service.redis_prefix,
        tmp_path,
        environ={
            "API_WORKERS": "1",
            "MAX_WAITING_PER_REPLICA": "1000",
            "OUTPUTS_URL": str(service.outputs),
        },
    )
    try:
        own.start_api()
        own.call("POST", "/v1/replicas/replica1/drain")
        yield own
    finally:
        service.call("POST", "/v1/replicas/replica1/resume")
        own.stop()


def test_two_hundred_clients_that_wait_hold_up_nobody(patient_api: Service, redis_url: str) -> None:
    # One long request keeps the replica, so that the others wait in its line.
    busy = patient_api.submit(num_inference_steps=1000, deterministic=True, priority="high")["id"]
    patient_api.at_step(busy, 1)
    others = taken(patient_api)

    def all_taken(count: int) -> bool:
        return taken(patient_api) == count

    with ExitStack() as stack, Redis.from_url(redis_url) as redis:
        before = len(redis.client_list())
        for number in range(1, WAITING + 1):
            stack.enter_context(
                send(patient_api, "/v1/images/generations", prompt="a", num_inference_steps=1000)
            )
            if number % AT_ONCE == 0:  # while they are taken each has a connection
                wait_until(partial(all_taken, others + number), 90, "all to be taken")
        assert held(patient_api) > WAITING // 2
        assert patient_api.call("GET", "/health", timeout_s=5).status == 200
        # All of them listen by the one connection of the process.
        assert len(redis.client_list()) - before < 60
    patient_api.call("POST", f"/v1/requests/{busy}/cancel")
    wait_until(lambda: held(patient_api) == 0, 60, "all to be gone")
    assert patient_api.call("GET", "/health", timeout_s=5).status == 200


def taken(service: Service) -> int:
    """How many requests the replica has been given so far."""
    replica = service.call("GET", "/v1/replicas/replica0").json
    return held(service) + int(replica["completed"] + replica["failed"])


def held(service: Service) -> int:
    """How many requests the replica has in its line or at work."""
    replica = service.call("GET", "/v1/replicas/replica0").json
    return int(replica["waiting"] + replica["running"])
