"""Wake-ups that come twice, come to nobody or are lost, and cancels that a dying process never saw.

The checks of the measured facts about Celery and Redis that concern a single replica.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from configs.settings import Settings
from routing.broker import Broker
from routing.claims import Claims
from routing.records import Records
from tests.chaos.history import History
from tests.e2e.service import Service
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LONG = 900
LOST = "wake-ups got lost"


@pytest.fixture
def redis(service: Service) -> Iterator[Redis]:
    with Redis.from_url(service.redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def settings(service: Service) -> Settings:
    """Those of the running service."""
    return Settings(
        redis_url=service.redis_url,
        redis_prefix=service.redis_prefix,
        outputs_url=f"file://{service.outputs}",
    )


@pytest.fixture
def broker(settings: Settings) -> Iterator[Broker]:
    """The sending side, over the service's own Redis."""
    broker = Broker(settings)
    yield broker
    broker.close()


@pytest.fixture
def busy(service: Service) -> Iterator[Any]:
    """A long request that keeps replica0 at work until it is canceled."""
    request = service.submit_to("replica0", "a red circle", num_inference_steps=LONG)
    service.at_step(request["id"], 1)
    yield request
    _cancel(service, request)
    service.ended(request["id"])


def _cancel(service: Service, request: Any) -> int:
    return service.call("POST", f"/v1/requests/{request['id']}/cancel").status


def test_what_waits_lies_in_the_list_and_only_what_runs_is_out(
    service: Service, redis: Redis, busy: Any
) -> None:
    before = redis.llen(f"{service.redis_prefix}replica0")
    waiting = [service.submit_to("replica0", "a blue star") for _ in range(3)]
    assert redis.llen(f"{service.redis_prefix}replica0") >= before + 3
    assert service.wait_for("replica0", "ready")["running"] == 1
    for request in waiting:
        assert _cancel(service, request) == 200


def test_wake_ups_that_got_lost_are_made_good(service: Service, redis: Redis, busy: Any) -> None:
    """As after processes that died between a message and its claim, or a move and its message."""
    waiting = [service.submit_to("replica0", "a blue star") for _ in range(6)]
    before = service.whole_log("replica0").count(LOST)
    redis.delete(f"{service.redis_prefix}replica0")
    _cancel(service, busy)
    for request in waiting:
        ended = service.ended(request["id"])
        assert (ended["status"], ended["replica"], ended["attempt"]) == ("succeeded", "replica0", 1)
    # All at once, not one of them at every other heartbeat.
    assert service.whole_log("replica0").count(LOST) == before + 1


def test_a_request_that_was_moved_and_whose_new_replica_was_never_told_runs(
    service: Service, settings: Settings, redis: Redis, busy: Any
) -> None:
    """As where the process that moves it dies between the record and the message."""
    waiting = service.submit_to("replica0", "a blue star")
    record = Records(settings, redis).get(waiting["id"])
    move = Claims(settings, redis).move_waiting(record)
    assert move is not None
    ended = service.ended(waiting["id"])
    assert (ended["status"], ended["replica"], ended["attempt"]) == ("succeeded", "replica1", 2)


def test_wake_ups_that_come_many_times_run_nothing_twice(
    service: Service, redis: Redis, broker: Broker
) -> None:
    requests = [service.submit() for _ in range(2)]
    for request in requests:
        for _ in range(5):
            assert broker.wake(request["replica"], request["id"], 1)
    for request in requests:
        assert service.ended(request["id"])["status"] == "succeeded"
    wait_until(
        lambda: (
            redis.llen(f"{service.redis_prefix}replica0") == 0
            and redis.llen(f"{service.redis_prefix}replica1") == 0
        ),
        20,
        "all wake-ups to be taken",
    )
    history = History.read(redis, service.redis_prefix)
    for request in requests:
        assert history.starts(request["id"]) == history.commits(request["id"]) == 1


def test_cancels_that_a_killed_process_never_saw_hold_after_its_restart(
    service: Service, redis: Redis
) -> None:
    """Restarted sooner than its heartbeat expires, too; one is canceled while nobody is there."""
    service.call("POST", "/v1/replicas/replica1/drain")
    running = service.submit("a red circle", num_inference_steps=LONG)
    waiting = service.submit("a red circle")
    service.at_step(running["id"], 1)
    service.processes["replica0"].send_signal(signal.SIGSTOP)
    assert _cancel(service, running) == 202
    service.end("replica0", signal.SIGKILL)
    assert _cancel(service, waiting) == 200
    service.start_replica("replica0")
    for request in (running, waiting):
        assert service.ended(request["id"])["status"] == "canceled"
    service.wait_for("replica0", "ready")
    assert service.ended(service.submit("a blue star")["id"])["attempt"] == 1
    service.call("POST", "/v1/replicas/replica1/resume")
    assert History.read(redis, service.redis_prefix).starts(running["id"]) == 1
    for request in (running, waiting):
        assert service.files(request["id"]) == []
