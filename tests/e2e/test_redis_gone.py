"""Redis goes away under a real replica and two API processes: what runs goes on, all come back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service import Service
from tests.redis_server import RedisServer, running_redis
from tests.sentinels import Sentinels
from tests.waiting import wait_until

AWAY_S = 6.0  # above the expiry of a heartbeat (3 s) and every timeout of a connection (2.5 s)
BACK_S = 60.0
LONG = 600  # steps: above AWAY_S on the bundled model
_PROMPT = {"prompt": "a red circle on a blue background", "seed": 7}


@pytest.fixture(scope="module")
def redis(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(redis_binary, tmp_path_factory.mktemp("redis"), durable=True) as server:
        yield server


@pytest.fixture(scope="module")
def service(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(redis.url, "gone:", tmp_path_factory.mktemp("gone"))
    try:
        running.start("replica0")
        yield running
    finally:
        running.stop()


def _freeze(redis: RedisServer) -> Callable[[], None]:
    redis.freeze()
    return redis.thaw


def _kill(redis: RedisServer) -> Callable[[], None]:
    redis.kill()
    return redis.start


@pytest.mark.parametrize("go", [_freeze, _kill])
def test_what_runs_goes_on_and_everybody_comes_back(
    service: Service, redis: RedisServer, go: Callable[[RedisServer], Callable[[], None]]
) -> None:
    running = service.submit(num_inference_steps=LONG, seed=1)
    waiting = service.submit(seed=7)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(service.ended, waiting["id"])
        step = service.at_step(running["id"], 1)["progress"]["step"]
        service.at_step(running["id"], step + 100)  # time enough for the other call to be held
        come_back = go(redis)
        until = time.monotonic() + AWAY_S
        refused = service.call("POST", "/v1/requests", _PROMPT)
        assert (refused.status, refused.json["error"]["code"]) == (503, "store_unavailable")
        assert int(refused.headers["Retry-After"]) > 0
        wait_until(lambda: time.monotonic() > until, AWAY_S + 1, "Redis to be away long enough")
        come_back()
        ended = wait_until(lambda: _ended(service, running["id"]), BACK_S, "the outcome")
        assert (ended["status"], ended["attempt"]) == ("succeeded", 1)
        assert ended["progress"]["step"] == LONG
        assert held.result(BACK_S)["status"] == "succeeded", "the held call came back by itself"
    again = wait_until(lambda: _accepted(service), BACK_S, "a submit to be accepted")
    assert service.ended(again)["status"] == "succeeded"
    listed = service.call("GET", "/v1/requests?status=queued").json["data"]
    assert listed == [], "what was refused with 503 is not there"


def test_a_service_under_sentinels_survives_the_death_of_the_master(
    redis_binary: str, tmp_path: Path
) -> None:
    with Sentinels(redis_binary, tmp_path) as sentinels:
        service = Service(sentinels.url, f"s-{secrets.token_hex(4)}:", tmp_path / "service")
        service.folder.mkdir()
        try:
            service.start("replica0")
            running = service.submit(num_inference_steps=200, seed=1)
            service.at_step(running["id"], 5)
            sentinels.wait_for_copy()
            sentinels.kill_master()
            ended = wait_until(lambda: _ended(service, running["id"]), BACK_S, "the outcome")
            assert ended["status"] == "succeeded"
            again = wait_until(lambda: _accepted(service), BACK_S, "a submit to be accepted")
            assert service.ended(again)["status"] == "succeeded"
        finally:
            service.stop()


def _ended(service: Service, request_id: str) -> Any:
    answer = service.call("GET", f"/v1/requests/{request_id}")
    return answer.json if answer.status == 200 and answer.json["finished_at"] else None


def _accepted(service: Service) -> Any:
    answer = service.call("POST", "/v1/requests", _PROMPT)
    return answer.json["id"] if answer.status == 202 else None
