"""Real workers and two API processes: mixed costs are spread by work, one key is one request."""

from __future__ import annotations

import http.client
import secrets
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.service import Service

LIGHT, HEAVY = 100, 400  # steps; long enough that nothing ends while they are submitted


@pytest.fixture(scope="module")
def by_work(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A second API before the same replicas, which routes by work."""
    other = Service(
        service.redis_url,
        service.redis_prefix,
        tmp_path_factory.mktemp("policies"),
        environ={"ROUTING_POLICY": "least_work"},
    )
    other.outputs = service.outputs
    try:
        other.start_api()
        yield other
    finally:
        other.stop()


def _largest_share(service: Service) -> int:
    """Submit 4 x and 1 x in turns; return the steps that the busier replica was given."""
    given: Counter[str] = Counter()
    ids = []
    for number in range(8):
        steps = HEAVY if number % 2 == 0 else LIGHT
        request = service.submit(num_inference_steps=steps)
        given[request["replica"]] += steps
        ids.append(request["id"])
    for request_id in ids:
        service.call("DELETE", f"/v1/requests/{request_id}")
    assert sum(given.values()) == 4 * (HEAVY + LIGHT)
    return max(given.values())


def test_least_work_ends_a_mix_of_costs_sooner_than_turns_would(by_work: Service) -> None:
    """By the steps of the busier replica: by turns it gets all the heavy ones, 1600 of 2000."""
    assert _largest_share(by_work) <= 3 * HEAVY


def test_two_processes_take_one_key_once(by_work: Service) -> None:
    """Both gunicorn processes answer; which one took a call is the kernel's choice."""
    body = {"prompt": "a red circle", "num_inference_steps": 1}
    for _ in range(10):
        headers = {"Idempotency-Key": secrets.token_hex(8)}
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(
                    lambda _, h=headers: by_work.call("POST", "/v1/requests", body, h),
                    range(8),
                )
            )
        assert {answer.status for answer in answers} <= {200, 202}
        assert [answer.status for answer in answers].count(202) <= 1
        assert len({answer.json["id"] for answer in answers}) == 1
        other = by_work.call("POST", "/v1/requests", {"prompt": "a blue star"}, headers)
        assert (other.status, other.json["error"]["code"]) == (409, "idempotency_key_reused")


def test_a_key_is_remembered_as_long_as_the_record(by_work: Service) -> None:
    headers = {"Idempotency-Key": "once"}
    body = {"prompt": "a red circle"}
    first = by_work.call("POST", "/v1/requests", body, headers).json["id"]
    by_work.ended(first)
    again = by_work.call("POST", "/v1/requests", body, headers)
    assert (again.status, again.json["id"]) == (200, first)
    by_work.call("DELETE", f"/v1/requests/{first}")
    anew = by_work.call("POST", "/v1/requests", body, headers)
    assert anew.status == 202
    assert anew.json["id"] != first
    by_work.ended(anew.json["id"])


def test_a_body_without_a_length_is_bounded_too(by_work: Service) -> None:
    """Sent in chunks, it is refused once it is larger than a body may be."""
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(64):
            sent += 1
            yield b"x" * 2**20

    connection = http.client.HTTPConnection("127.0.0.1", by_work.port, timeout=60)
    headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    try:
        connection.request("POST", "/v1/requests", chunks(), headers, encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # it hung up before it was told all
    finally:
        connection.close()
    assert sent < 64
    assert by_work.call("GET", "/health").status == 200
