"""The API while Redis is away, and when it is back."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from configs.settings import Settings
from tests.integration.api_world import (
    Api,
    body_of,
    error_of,
)
from tests.integration.conftest import ApiOpener
from tests.redis_server import RedisServer, free_port
from tests.waiting import wait_until


@pytest.fixture
def away(api_settings: Settings, open_api: ApiOpener) -> Api:
    """An API whose Redis does not answer."""
    return open_api(replace(api_settings, redis_url=f"redis://127.0.0.1:{free_port()}/0"))


def test_without_redis_the_api_says_so_at_once(away: Api) -> None:
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


def test_the_api_goes_on_when_redis_is_back(
    api_settings: Settings, open_api: ApiOpener, own_redis: RedisServer
) -> None:
    api = open_api(replace(api_settings, redis_url=own_redis.url)).start()
    api.replica().load()
    assert api.submit().status_code == 202
    own_redis.stop()
    assert api.submit().status_code == 503
    own_redis.start()
    replica = api.replica().load()
    path = api.submit().headers["Location"]
    with ThreadPoolExecutor() as pool:
        held = pool.submit(api.get, path, Prefer="wait=30")
        wait_until(lambda: api.service.held_calls.count == 1, 5, "the call to be held")
        replica.succeed(replica.claim())
        assert body_of(held.result(timeout=10))["status"] == "succeeded"
