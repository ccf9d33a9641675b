"""Cancels and removals: final while a request waits, a wish that holds while it runs."""

from __future__ import annotations

import pytest
from redis import Redis

from configs.errors import NotFound
from routing.records import CancelAnswer
from routing.request import Failure, Outcome, Status
from tests.integration.routing_world import SUCCESS, World


def test_cancel_of_a_waiting_request_is_final_at_once(world: World) -> None:
    world.start("replica0")
    request, other = world.submit(), world.submit()
    assert world.records.cancel(request.id) is CancelAnswer.CANCELED
    assert world.get(request.id).status is Status.CANCELED
    claimed = world.claim("replica0")
    assert claimed is not None
    assert claimed.id == other.id


def test_cancel_of_a_running_request_is_a_wish_its_replica_reads(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.records.cancel(request.id) is CancelAnswer.STOPPING
    signals = world.claims.progress(claimed, 1, 4, 0.1)
    assert signals is not None
    assert signals.cancel
    assert world.claims.finish(claimed, Outcome(Status.CANCELED))
    assert world.records.cancel(request.id) is CancelAnswer.TERMINAL


def test_a_cancel_written_while_the_replica_is_dead_holds_when_it_comes_back(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    assert world.claim("replica0") is not None
    world.records.cancel(request.id)
    world.start("replica0")
    world.sweep.run()
    assert world.get(request.id).status is Status.CANCELED
    assert world.claim("replica0") is None


@pytest.mark.parametrize(
    "outcome", [SUCCESS, Outcome(Status.FAILED, error=Failure("generation_failed", "no"))]
)
def test_a_cancel_that_was_answered_holds_though_the_run_had_done_its_last_step(
    world: World, outcome: Outcome
) -> None:
    world.start("replica0")
    request, other = world.submit(), world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.records.cancel(request.id) is CancelAnswer.STOPPING
    for _ in range(2):  # its answer may get lost
        assert not world.claims.finish(claimed, outcome)
    record = world.get(request.id)
    assert (record.status, record.outputs, record.error) == (Status.CANCELED, (), None)
    replica = world.registry.get("replica0")
    assert replica is not None
    assert (replica.running, replica.completed, replica.failed) == (0, 0, 0)
    assert world.run("replica0", 1.0).id == other.id


def test_remove_of_an_ended_request_leaves_no_key(world: World, redis_client: Redis) -> None:
    world.start("replica0")
    request = world.submit(idempotency_key="k", fingerprint="f")
    world.router.remove(request.id)
    with pytest.raises(NotFound):
        world.get(request.id)
    left = [
        key for key in redis_client.keys(f"{world.settings.redis_prefix}*") if request.id in key
    ]
    assert left == []
    assert redis_client.get(f"{world.settings.redis_prefix}idempotency:k") is None


def test_a_running_request_that_is_removed_is_gone_at_once_and_leaves_nothing_later(
    world: World,
) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    world.router.remove(request.id)
    with pytest.raises(NotFound):
        world.get(request.id)
    assert list(world.records.newest()) == []
    signals = world.claims.progress(claimed, 1, 4, 0.1)
    assert signals is not None
    assert signals.cancel
    # It may still have succeeded in that instant: its replica is told to remove the files.
    assert not world.claims.finish(claimed, SUCCESS)
    assert not world.redis.exists(f"{world.settings.redis_prefix}request:{request.id}")
