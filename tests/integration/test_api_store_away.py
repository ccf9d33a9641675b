"""The door while Redis is away, and when it is back."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from configs.settings import Settings
from tests.integration.api_world import (
    Door,
    body_of,
    error_of,
)
from tests.integration.conftest import OpenDoor
from tests.redis_server import RedisServer, free_port
from tests.waiting import wait_until


@pytest.fixture
def away(api_settings: Settings, open_door: OpenDoor) -> Door:
    """A door whose Redis does not answer."""
    return open_door(replace(api_settings, redis_url=f"redis://127.0.0.1:{free_port()}/0"))


def test_without_redis_the_door_says_so_at_once(away: Door) -> None:
    for call in (
        away.submit,
        lambda: away.get("/v1/requests"),
        lambda: away.get("/v1/requests/req_x"),
        lambda: away.get("/v1/replicas"),
        lambda: away.get("/ready"),
    ):
        started = time.monotonic()
        answer = call()
        assert time.monotonic() - started < 2
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "store_unavailable"
        assert int(answer.headers["Retry-After"]) >= 1
    assert away.get("/health").status_code == 200


def test_the_door_goes_on_when_redis_is_back(
    api_settings: Settings, open_door: OpenDoor, own_redis: RedisServer
) -> None:
    door = open_door(replace(api_settings, redis_url=own_redis.url)).start()
    door.replica().load()
    assert door.submit().status_code == 202
    own_redis.stop()
    assert door.submit().status_code == 503
    own_redis.start()
    replica = door.replica().load()
    path = door.submit().headers["Location"]
    with ThreadPoolExecutor() as pool:
        held = pool.submit(door.get, path, Prefer="wait=30")
        wait_until(lambda: door.service.held_calls.count == 1, 5, "the call to be held")
        replica.succeed(replica.claim())
        assert body_of(held.result(timeout=10))["status"] == "succeeded"
