"""Redis away, in every way: 503 within three seconds, nothing half-accepted, and back by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TypeVar

import pytest
from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeout

from configs.errors import NotFound
from configs.settings import Settings
from routing.broker import Broker
from routing.connection import API_ANSWER_S, API_CONNECT_S, connect
from routing.request import Status
from routing.router import Router
from tests.integration.api_world import Api, body_of, error_of
from tests.integration.conftest import ApiOpener
from tests.integration.routing_world import World
from tests.network import mute_port, swallowing_port
from tests.redis_server import RedisServer, free_port
from tests.waiting import wait_until

T = TypeVar("T")
Away = Callable[[], AbstractContextManager[int]]
PROMISED_S = 3.0
TRIES = 4  # one in time shows it: a machine with other work may stop a test for seconds
BACK_S = 30.0


@contextmanager
def _refusing_port() -> Iterator[int]:
    yield free_port()


def _in_time(call: Callable[[], T]) -> tuple[T, bool]:
    """Return what the call returned, and whether it was there at the deadline."""
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
        late = wait([called], PROMISED_S).not_done
    return called.result(), not late


def _refused(api: Api) -> bool:
    """Submit in vain; return whether the refusal came in time."""
    answer, in_time = _in_time(api.submit)
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "store_unavailable"
    assert int(answer.headers["Retry-After"]) > 0
    return in_time


@pytest.fixture
def own_settings(own_redis: RedisServer, api_settings: Settings) -> Settings:
    return replace(api_settings, redis_url=own_redis.url, sweep_s=0.1)


@pytest.mark.parametrize("away", [_refusing_port, mute_port, swallowing_port])
def test_a_submit_is_answered_in_time_where_redis_never_was(
    api_settings: Settings, open_api: ApiOpener, away: Away
) -> None:
    with away() as port:
        api = open_api(replace(api_settings, redis_url=f"redis://127.0.0.1:{port}/0"))
        assert any(_refused(api) for _ in range(TRIES))


def test_a_submit_is_answered_in_time_while_redis_hangs_and_all_is_well_after(
    own_redis: RedisServer, own_settings: Settings, open_api: ApiOpener
) -> None:
    api = open_api(own_settings).start()
    replica = api.replica().load()
    before = api.submitted()["id"]

    def in_time() -> bool:
        """By a connection that stood before, and by new ones."""
        own_redis.freeze()
        both = [_refused(api), _refused(api)]
        own_redis.thaw()
        wait_until(lambda: api.submit().status_code == 202, BACK_S, "a submit after the thaw")
        return all(both)

    assert any(in_time() for _ in range(TRIES))
    held = api.get(f"/v1/requests/{before}")
    assert body_of(held)["status"] == "queued"
    replica.succeed(replica.claim())
    assert body_of(api.get(f"/v1/requests/{before}", Prefer="wait=20"))["status"] == "succeeded"


def test_a_held_call_outlives_redis_hanging(
    own_redis: RedisServer, own_settings: Settings, open_api: ApiOpener
) -> None:
    api = open_api(own_settings).start()
    replica = api.replica().load()
    request_id = api.submitted()["id"]
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(api.get, f"/v1/requests/{request_id}", Prefer="wait=50")
        wait_until(lambda: api.service.held_calls.count == 1, BACK_S, "the call to be held")
        own_redis.freeze()
        # The reader of changes gives its connection up meanwhile, and finds a new one.
        until = time.monotonic() + 3
        wait_until(lambda: time.monotonic() > until, 10, "more than every timeout")
        own_redis.thaw()
        replica.succeed(replica.claim())
        assert body_of(held.result(BACK_S))["status"] == "succeeded"


def test_a_submit_that_waits_is_answered_though_redis_went_away(
    own_redis: RedisServer, own_settings: Settings, open_api: ApiOpener
) -> None:
    """It was accepted, and nothing may take that back."""
    api = open_api(own_settings).start()
    api.replica().load()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(api.submit, {"Prefer": "wait=3"})
        wait_until(lambda: api.service.held_calls.count == 1, BACK_S, "the call to be held")
        own_redis.stop()
        answer = held.result(BACK_S)
    assert (answer.status_code, body_of(answer)["status"]) == (202, "queued")


def test_redis_that_went_and_came_back_serves_again(
    own_redis: RedisServer, own_settings: Settings, open_api: ApiOpener
) -> None:
    api = open_api(own_settings).start()
    api.replica().load()
    api.submitted()
    own_redis.stop()
    _refused(api)
    assert api.get("/health").status_code == 200
    own_redis.start()
    replica = api.replica().load()
    path = api.submit().headers["Location"]
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(api.get, path, Prefer="wait=30")
        wait_until(lambda: api.service.held_calls.count == 1, BACK_S, "the call to be held")
        replica.succeed(replica.claim())
        assert body_of(held.result(BACK_S))["status"] == "succeeded"


def test_what_was_recorded_though_its_answer_got_lost_is_withdrawn(
    own_redis: RedisServer, own_settings: Settings
) -> None:
    """Redis does what it was told before it hung; the client was told 503."""
    world = World(own_settings, connect(own_redis.url, API_CONNECT_S, API_ANSWER_S))
    world.start("replica0")
    kept = world.submit()
    lost, named = world.submission(), world.submission(idempotency_key="mine", fingerprint="f")
    other = World(own_settings, connect(own_redis.url, API_CONNECT_S, API_ANSWER_S))
    other.redis.ping()  # each has a connection that stands
    own_redis.freeze()
    for api, new in ((world, lost), (other, named)):
        with pytest.raises(RedisTimeout):
            api.router.submit(new)
    own_redis.thaw()
    wait_until(lambda: _is_recorded(world, lost.id), BACK_S, "the lost submit to be recorded")
    wait_until(lambda: _is_recorded(world, named.id), BACK_S, "the named one too")
    world.router.withdraw()
    assert not _is_recorded(world, lost.id)
    assert {request.id for request in world.claims.waiting_at("replica0")} == {
        kept.id,
        named.id,
    }
    again = world.records.submit(replace(named, id="req_another"))
    assert (again.created, again.request.id) == (False, named.id)
    for each in (world, other):
        each.router.withdraw()
        assert each.lost.all() == []
        each.broker.close()
    assert _is_recorded(world, named.id)


def test_a_submit_that_never_got_there_leaves_no_files(
    settings: Settings, redis_client: Redis
) -> None:
    world = World(settings, redis_client)
    world.outputs.write("req_lost/input-0.png", b"png")
    world.lost.add("req_lost", has_key=True)
    world.router.withdraw()
    assert world.outputs.names("req_lost") != []  # it may be recorded yet
    world.clock.forward(300)
    world.router.withdraw()
    assert world.outputs.names("req_lost") == []
    assert world.lost.all() == []


def test_a_submit_may_reach_redis_long_after_its_client_was_refused(
    own_redis: RedisServer, own_settings: Settings
) -> None:
    """It lay in the socket of a Redis that hung for longer than lost submits are remembered."""
    world = World(own_settings, connect(own_redis.url, API_CONNECT_S, API_ANSWER_S))
    world.start("replica0")
    world.submit()  # Redis knows the script, and will run it
    lost = world.submission()
    own_redis.freeze()
    with pytest.raises(RedisTimeout):
        world.router.submit(lost)
    world.clock.forward(3600)
    with pytest.raises(RedisTimeout):
        world.router.withdraw()
    assert [each.is_old for each in world.lost.all()] == [False]
    own_redis.thaw()
    world.router.withdraw()  # Redis may get to this before it gets to the submit
    wait_until(
        lambda: world.lost.all() == [] or _is_recorded(world, lost.id),
        BACK_S,
        "the lost submit to be recorded, or withdrawn already",
    )
    world.router.withdraw()
    assert not _is_recorded(world, lost.id)
    world.broker.close()


def _is_recorded(world: World, request_id: str) -> bool:
    try:
        return world.get(request_id).status is Status.QUEUED
    except NotFound:
        return False


def test_the_same_submit_sent_twice_by_the_connection_is_one_request(
    settings: Settings, redis_client: Redis
) -> None:
    """The client library sends a command again whose connection broke before the answer."""
    world = World(settings, redis_client)
    world.start("replica0")
    world.start("replica1")
    new = world.submission()
    first, again = world.records.submit(new), world.records.submit(new)
    assert first.request == again.request
    lines = [world.claims.waiting_at(name) for name in ("replica0", "replica1")]
    assert sum(len(line) for line in lines) == 1


@pytest.mark.parametrize("away", [_refusing_port, mute_port, swallowing_port])
def test_a_wake_up_that_does_not_get_through_loses_nothing(
    settings: Settings, redis_client: Redis, away: Away
) -> None:
    """The record is what counts; its replica finds it by the heartbeat."""
    world = World(settings, redis_client)
    world.start("replica0")
    with away() as port:
        broker = Broker(replace(settings, redis_url=f"redis://127.0.0.1:{port}/0"))
        router = Router(world.settings, world.redis, broker, world.clock)

        def in_time() -> bool:
            accepted, came = _in_time(lambda: router.submit(world.submission()))
            assert accepted.created
            assert world.get(accepted.request.id).status is Status.QUEUED
            return came

        assert any(in_time() for _ in range(TRIES))
        broker.close()


def test_messages_do_not_pile_up_where_requests_come_and_go(world_of_one: World) -> None:
    """A wake-up is sent only where there are fewer messages than waiting requests."""
    for _ in range(50):
        accepted = world_of_one.router.submit(world_of_one.submission())
        world_of_one.records.cancel(accepted.request.id)
    prefix = world_of_one.settings.redis_prefix
    assert world_of_one.redis.llen(f"{prefix}replica0") == 1
    for _ in range(3):
        world_of_one.router.submit(world_of_one.submission())
    assert world_of_one.redis.llen(f"{prefix}replica0") == 3


@pytest.fixture
def world_of_one(settings: Settings, redis_client: Redis) -> Iterator[World]:
    world = World(settings, redis_client)
    world.start("replica0")
    yield world
    world.broker.close()
