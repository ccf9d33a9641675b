"""A replica with an empty queue takes what waits for others; a new request goes to an idle one."""

from __future__ import annotations

from typing import Any

from redis import Redis

from configs.settings import Settings
from routing.claims import Finished
from routing.replica import ReplicaState
from routing.request import Priority, Request, Status
from tests.integration.routing_world import SUCCESS, World


def _backlog(world: World, **changes: object) -> tuple[Request, list[Request]]:
    """One request runs on replica0 and three wait there; replica1 has joined since."""
    world.start("replica0")
    running = world.submit()
    assert world.claim("replica0") is not None
    waiting = [world.submit(**changes) for _ in range(3)]
    world.start("replica1")
    return running, waiting


def _messages(world: World, name: str) -> int:
    count: int = world.redis.llen(f"{world.settings.redis_prefix}{name}")
    return count


def test_the_best_that_waits_elsewhere_is_taken_and_everything_of_it_follows(world: World) -> None:
    _, (first, second, third) = _backlog(world)
    urgent = world.get(third.id)
    world.records.edit(urgent, urgent.parameters, Priority.HIGH, timeout=None)
    for each in (first, second, third):
        world.broker.wake("replica0", each.id, 1)
    taken = world.claims.claim("replica1", world.incarnations["replica1"])
    assert taken is not None
    assert taken.others_wait
    assert taken.request.id == third.id
    record = world.get(third.id)
    assert (record.status, record.replica, record.attempt) == (Status.RUNNING, "replica1", 1)
    assert _messages(world, "replica0") == 2  # its wake-up went with it
    assert [world.place(each.id) for each in (first, second)] == [1, 2]
    newest: Any = world.redis.xrevrange(f"{world.settings.redis_prefix}changes", count=1)
    change = newest[0][1]
    assert (change["event"], change["id"], change["replica"]) == ("started", third.id, "replica1")
    progress = world.claims.progress(taken.request, 1, 4, 0.1)
    assert progress is not None
    world.router.cancel(third.id)
    progress = world.claims.progress(taken.request, 2, 4, 0.1)
    assert progress is not None
    assert progress.cancel
    assert [r.stolen for r in world.registry.all()] == [0, 1]


def test_who_ends_a_request_is_told_that_others_wait_and_who_has_a_wake_up_is_not(
    world: World,
) -> None:
    _, waiting = _backlog(world)
    own = world.submit()
    assert own.replica == "replica1"
    claimed = world.claim("replica1")
    assert claimed is not None
    assert world.claims.finish(claimed, SUCCESS) is Finished.OTHERS_WAIT
    world.broker.wake("replica1", "-", 0)
    for each in waiting:
        taken = world.claims.claim("replica1", world.incarnations["replica1"])
        assert taken is not None
        assert (taken.request.id, taken.others_wait) == (each.id, False)
        assert world.claims.finish(taken.request, SUCCESS) is Finished.RECORDED
    assert world.claim("replica1") is None


def test_an_idle_replica_hears_by_its_heartbeat_what_waits_elsewhere(world: World) -> None:
    _backlog(world)
    assert world.standing("replica1").elsewhere == 3
    assert world.standing("replica0").elsewhere == 0  # its own queue comes first


def test_an_affinity_key_holds_a_request_for_its_patience(world: World) -> None:
    world.start("replica0")
    world.start("replica1")
    held = world.submit(affinity_key="a")
    other = "replica1" if held.replica == "replica0" else "replica0"
    world.clock.forward(world.settings.affinity_patience_s - 0.1)
    for name in ("replica0", "replica1"):
        world.beat(name)
    assert world.claim(other) is None
    assert world.standing(other).elsewhere == 0
    world.clock.forward(0.1)
    assert world.standing(other).elsewhere == 1
    taken = world.claim(other)
    assert taken is not None
    assert (taken.id, taken.replica) == (held.id, other)


def test_a_move_to_another_replica_begins_the_patience_anew(world: World) -> None:
    world.start("replica0")
    held = world.submit(affinity_key="a")
    claimed = world.claim("replica0")
    assert claimed is not None
    world.clock.forward(world.settings.affinity_patience_s)
    world.beat("replica0")
    world.start("replica1")
    world.start("replica2")
    assert world.claims.hand_back(claimed) is not None
    replica = world.get(held.id).replica
    (other,) = {"replica1", "replica2"} - {replica}
    assert world.claim(other) is None
    assert world.claim(replica) is not None


def test_what_must_run_alone_is_taken_by_an_idle_replica_and_passed_over_by_a_busy_one(
    world: World,
) -> None:
    world.start("replica0")
    blamed, innocent = world.submit(), world.submit()
    assert world.claim("replica0") is not None
    world.start("replica0")
    world.sweep.run()  # it has crashed once, and waits for replica0 again
    world.start("replica1")
    own = world.submit()
    assert own.replica == "replica1"
    world.clock.forward(1.0)  # replica0 has had its time to take them
    for expected in (own, innocent):
        taken = world.claim("replica1")
        assert taken is not None
        assert taken.id == expected.id
    assert world.claim("replica1") is None
    world.start("replica2")
    taken = world.claim("replica2")
    assert taken is not None
    assert taken.id == blamed.id


def test_a_new_request_is_left_to_its_own_replica_while_that_has_room(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    world.start("replica1")
    assert world.claim("replica1") is None
    world.clock.forward(1.0)
    taken = world.claim("replica1")
    assert taken is not None
    assert taken.id == request.id


def test_nothing_is_taken_from_another_stage_nor_by_who_is_drained(world: World) -> None:
    _, waiting = _backlog(world)
    world.start("replica2", stage=1)
    assert world.claim("replica2") is None
    world.router.drain("replica1", 0)
    assert world.claim("replica1") is None
    assert {world.get(each.id).replica for each in waiting} == {"replica0"}


def test_a_request_goes_to_an_idle_replica_before_the_next_in_turn(
    settings: Settings, redis_client: Redis
) -> None:
    world = World(settings, redis_client)
    for name in ("replica0", "replica1", "replica2"):
        world.start(name)
    running = [world.submit() for _ in range(3)]
    for name in ("replica0", "replica1", "replica2"):
        assert world.claim(name) is not None
    ended = world.get(running[2].id)
    assert world.claims.finish(ended, SUCCESS)
    assert world.submit().replica == ended.replica
    assert [world.submit().replica for _ in range(3)] == ["replica1", "replica2", "replica0"]


def test_what_is_handed_back_goes_to_an_idle_replica(world: World) -> None:
    for name in ("replica0", "replica1", "replica2"):
        world.start(name)
    requests = {request.replica: request for request in (world.submit() for _ in range(3))}
    claims = {name: world.claim(name) for name in requests}
    third = claims["replica2"]
    assert third is not None
    assert world.claims.finish(third, SUCCESS)
    world.beat("replica0", ReplicaState.DRAINING)
    first = claims["replica0"]
    assert first is not None
    moved = world.claims.hand_back(first)
    assert moved is not None
    assert moved.replica == "replica2"
