"""What dead, restarted and drained replicas held goes to the living; no innocent is blamed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis import Redis

from configs.settings import Settings
from routing.claims import MustRunAlone
from routing.outcome import Outcome, Status
from routing.record import Priority, Request
from routing.replica import ReplicaState
from tests.integration.routing_world import World


@pytest.fixture
def world(settings: Settings, redis_client: Redis) -> World:
    return World(settings, redis_client)


def _queue_length(world: World, name: str) -> int:
    length: int = world.redis.llen(f"{world.settings.redis_prefix}{name}")
    return length


def _expire_all_but(world: World, *living: str) -> None:
    world.clock.forward(world.settings.heartbeat_expiry_s + 0.1)
    for name in living:
        world.beat(name)


def test_a_dead_replicas_requests_go_to_the_one_with_the_shortest_line(world: World) -> None:
    for name in ("replica0", "replica1", "replica2"):
        world.start(name)
    requests = [world.submit() for _ in range(6)]
    held = [request for request in requests if request.replica == "replica0"]
    running = world.claim("replica0")
    assert running is not None
    assert world.claim("replica1") is not None
    _expire_all_but(world, "replica1", "replica2")
    assert world.sweep.run()
    moved = [world.get(request.id) for request in held]
    assert {request.status for request in moved} == {Status.QUEUED}
    assert {request.attempt for request in moved} == {2}
    assert sorted(request.crashes for request in moved) == [0, 1]
    assert {request.replica for request in moved} <= {"replica1", "replica2"}
    assert world.get(running.id).replica == "replica1"
    assert sum(_queue_length(world, name) for name in ("replica1", "replica2")) == 2


def test_a_request_keeps_its_place_in_the_line_when_it_moves(world: World) -> None:
    world.start("replica0")
    early = world.submit()
    world.start("replica1")
    late = [world.submit() for _ in range(4)]
    _expire_all_but(world, "replica1")
    world.sweep.run()
    order = [claimed.id for _ in range(5) if (claimed := world.claim("replica1"))]
    assert order == [early.id, *(request.id for request in late)]


def test_a_restart_faster_than_the_expiry_is_seen_by_its_incarnation(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    assert world.claim("replica0") is not None
    world.start("replica0")
    world.sweep.run()
    record = world.get(request.id)
    assert (record.status, record.replica, record.attempt, record.crashes) == (
        Status.QUEUED,
        "replica0",
        2,
        1,
    )
    again = world.claim("replica0")
    assert again is not None
    assert again.attempt == 2


def test_with_no_other_replica_requests_wait_for_their_own(world: World) -> None:
    world.start("replica0")
    waiting, running = world.submit(), world.submit()
    assert world.claim("replica0") is not None
    _expire_all_but(world)
    world.sweep.run()
    world.sweep.run()
    assert {world.get(request.id).status for request in (waiting, running)} == {Status.QUEUED}
    assert {world.get(request.id).replica for request in (waiting, running)} == {"replica0"}
    world.start("replica1")
    world.sweep.run()
    assert {world.get(request.id).replica for request in (waiting, running)} == {"replica1"}


def test_a_request_that_kills_its_replicas_fails_at_the_last_attempt(
    world: World, settings: Settings
) -> None:
    world.start("replica0")
    poison, innocent = world.submit(), world.submit()
    for _ in range(settings.max_attempts):
        claimed = world.claim("replica0")
        assert claimed is not None
        assert claimed.id == poison.id
        world.start("replica0")
        world.sweep.run()
    record = world.get(poison.id)
    assert record.status is Status.FAILED
    assert record.error is not None
    assert record.error.code == "replica_crashed"
    assert world.get(innocent.id).status is Status.QUEUED
    assert world.get(innocent.id).crashes == 0


def test_draining_moves_what_waits_and_keeps_what_runs(world: World) -> None:
    world.start("replica0")
    running, waiting = world.submit(), world.submit()
    assert world.claim("replica0") is not None
    world.start("replica1")
    drained = world.router.rotation.drain("replica0", 5)
    assert drained.state is ReplicaState.DRAINING
    assert world.get(running.id).status is Status.RUNNING
    assert world.get(waiting.id).replica == "replica1"
    assert world.beat("replica0") is ReplicaState.DRAINING
    assert {world.submit().replica for _ in range(3)} == {"replica1"}
    assert world.router.rotation.resume("replica0").state is ReplicaState.READY
    assert {world.submit().replica for _ in range(3)} == {"replica0", "replica1"}


def test_a_drained_replica_starts_nothing_even_where_it_is_the_only_one(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    world.router.rotation.drain("replica0", 5)
    assert world.claim("replica0") is None
    world.router.rotation.resume("replica0")
    claimed = world.claim("replica0")
    assert claimed is not None
    assert claimed.id == request.id


def test_handing_back_blames_nobody(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    world.start("replica1")
    move = world.router.claims.hand_back(claimed)
    assert move is not None
    assert (move.replica, move.attempt) == ("replica1", 2)
    assert world.get(request.id).crashes == 0
    assert world.router.claims.hand_back(claimed) is None


def test_one_sweep_at_a_time(world: World) -> None:
    world.redis.set(f"{world.settings.redis_prefix}sweep", "somebody")
    assert world.sweep.run() is False
    world.redis.delete(f"{world.settings.redis_prefix}sweep")
    assert world.sweep.run() is True


def test_an_older_process_of_the_same_name_learns_that_it_is_superseded(world: World) -> None:
    former = world.start("replica0")
    newer = world.start("replica0")
    world.incarnations["replica0"] = former
    assert world.beat("replica0") is ReplicaState.GONE
    replica = world.router.registry.get("replica0")
    assert replica is not None
    assert replica.heartbeat.incarnation == newer
    assert replica.restarts == 1


def test_a_replica_long_gone_is_forgotten(world: World) -> None:
    world.start("replica0")
    world.clock.forward(3601)
    world.sweep.run()
    assert world.router.registry.all() == []


def test_what_was_in_a_crash_runs_alone_so_that_no_neighbour_is_blamed(world: World) -> None:
    world.start("replica0")
    poison, neighbour, other = (world.submit() for _ in range(3))
    assert world.claim("replica0") is not None
    assert world.claim("replica0") is not None
    world.start("replica0")
    world.sweep.run()
    alone = world.claim("replica0")
    assert alone is not None
    assert alone.id == poison.id
    with pytest.raises(MustRunAlone):
        world.router.claims.claim("replica0", world.incarnations["replica0"])
    world.start("replica0")
    world.sweep.run()
    crashes = [world.get(request.id).crashes for request in (poison, neighbour, other)]
    assert crashes == [2, 1, 0]


def _blamed(world: World, *requests: Request) -> list[tuple[Status, int]]:
    found = [world.get(request.id) for request in requests]
    return [(request.status, request.crashes) for request in found]


def _run_alone_and_crash(world: World) -> None:
    assert world.claim("replica0") is not None
    assert world.claim("replica0") is None
    world.start("replica0")
    world.sweep.run()


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_a_crash_in_company_ends_nobody_and_one_alone_does(
    settings: Settings, redis_client: Redis, max_attempts: int
) -> None:
    world = World(replace(settings, max_attempts=max_attempts), redis_client)
    world.start("replica0")
    requests = [world.submit() for _ in range(3)]
    claims = [world.claim("replica0") for _ in requests]
    world.start("replica0")
    # The sweep may die between the two, and another one do the rest.
    assert claims[0] is not None
    assert world.router.claims.move_crashed(claims[0]) is not None
    world.sweep.run()
    assert _blamed(world, *requests) == [(Status.QUEUED, 1)] * 3
    for _ in range(max(1, max_attempts - 1)):
        _run_alone_and_crash(world)
    poison, *innocents = requests
    assert _blamed(world, poison) == [(Status.FAILED, max(2, max_attempts))]
    assert _blamed(world, *innocents) == [(Status.QUEUED, 1)] * 2
    for each in innocents:
        assert world.run("replica0", 1.0).id == each.id


def test_with_one_attempt_the_first_crash_alone_is_the_last(
    settings: Settings, redis_client: Redis
) -> None:
    world = World(replace(settings, max_attempts=1), redis_client)
    world.start("replica0")
    poison, innocent = world.submit(), world.submit()
    assert world.claim("replica0") is not None
    world.start("replica0")
    world.sweep.run()
    assert _blamed(world, poison, innocent) == [(Status.FAILED, 1), (Status.QUEUED, 0)]
    error = world.get(poison.id).error
    assert error is not None
    assert "while it ran this request, 1 time;" in error.message


def test_who_is_canceled_in_a_crash_was_company_all_the_same(
    settings: Settings, redis_client: Redis
) -> None:
    world = World(replace(settings, max_attempts=1), redis_client)
    world.start("replica0")
    requests = [world.submit(), world.submit()]
    claims = [world.claim("replica0") for _ in requests]
    world.router.store.cancel(requests[0].id)
    world.start("replica0")
    for claimed in claims:
        assert claimed is not None
        world.router.claims.move_crashed(claimed)
    assert _blamed(world, *requests) == [(Status.CANCELED, 0), (Status.QUEUED, 1)]


def test_a_waiting_request_expires_though_no_replica_ever_looks_at_it(world: World) -> None:
    world.start("replica0")
    request, kept = world.submit(expires_in=5.0), world.submit(expires_in=60.0)
    world.clock.forward(6)
    world.sweep.run()
    assert world.get(request.id).status is Status.EXPIRED
    assert world.get(kept.id).status is Status.QUEUED


def test_a_request_that_has_begun_once_does_not_expire_on_its_next_attempt(world: World) -> None:
    world.start("replica0")
    request = world.submit(expires_in=5.0)
    assert world.claim("replica0") is not None
    world.clock.forward(6)
    world.start("replica0")
    world.sweep.run()
    world.sweep.run()
    again = world.claim("replica0")
    assert again is not None
    assert (again.id, again.attempt) == (request.id, 2)


def test_an_edit_of_expires_in_moves_the_moment(world: World) -> None:
    world.start("replica0")
    request = world.submit(expires_in=5.0)
    world.router.store.edit(
        request, request.parameters, request.priority, timeout=None, expires_in=60.0
    )
    world.clock.forward(6)
    world.sweep.run()
    assert world.get(request.id).status is Status.QUEUED


def test_a_suspect_runs_alone_and_is_not_blamed(world: World) -> None:
    world.start("replica0")
    suspect, other = world.submit(), world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.router.claims.hand_back(claimed, suspect=True) is not None
    beside = world.claim("replica0")
    assert beside is not None
    assert beside.id == suspect.id
    assert world.get(suspect.id).crashes == 0
    assert world.claim("replica0") is None
    world.router.claims.finish(beside, Outcome(Status.CANCELED))
    first = world.claim("replica0")
    assert first is not None
    assert first.id == other.id


def test_what_is_moved_keeps_its_place_by_priority_and_age(world: World) -> None:
    world.start("replica0")
    low, normal, high = (
        world.submit(priority=priority)
        for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH)
    )
    world.start("replica1")
    world.start("replica0", ReplicaState.FAILED)
    later = [world.submit(priority=priority) for priority in (Priority.NORMAL, Priority.HIGH)]
    world.sweep.run()
    order = [claimed.id for _ in range(5) if (claimed := world.claim("replica1"))]
    assert order == [high.id, later[1].id, normal.id, later[0].id, low.id]


def test_a_heartbeat_hears_how_many_that_wait_have_no_message(world: World) -> None:
    world.start("replica0")
    queue = f"{world.settings.redis_prefix}replica0"
    for _ in range(3):
        world.submit()
    world.redis.lpush(queue, "one")
    assert world.standing("replica0").unannounced == 2
    world.redis.lpush(queue, *["another"] * 5)
    standing = world.standing("replica0")
    assert (standing.waiting, standing.unannounced) == (3, 0)
