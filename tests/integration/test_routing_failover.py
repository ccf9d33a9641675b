"""What dead, restarted and drained replicas held goes to the living, and keeps its place."""

from __future__ import annotations

from routing.replica import ReplicaState
from routing.request import Priority, Status
from tests.integration.routing_world import World


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


def test_what_lives_is_not_taken_for_dead_by_what_was_read_of_it_before(world: World) -> None:
    """A sweep that read the registry, and went on after the replica had been started again."""
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.claims.move_from_dead(claimed) is None
    for state in (ReplicaState.DRAINING, ReplicaState.LOADING):
        world.beat("replica0", state)
        assert world.claims.move_from_dead(claimed) is None
    record = world.get(request.id)
    assert (record.status, record.attempt, record.crashes) == (Status.RUNNING, 1, 0)
    world.beat("replica0", ReplicaState.GONE)
    assert world.claims.move_from_dead(claimed) is not None
    assert world.get(request.id).crashes == 1


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


def test_draining_moves_what_waits_and_keeps_what_runs(world: World) -> None:
    world.start("replica0")
    running, waiting = world.submit(), world.submit()
    assert world.claim("replica0") is not None
    world.start("replica1")
    drained = world.router.drain("replica0", 5)
    assert drained.state is ReplicaState.DRAINING
    assert world.get(running.id).status is Status.RUNNING
    assert world.get(waiting.id).replica == "replica1"
    assert world.beat("replica0") is ReplicaState.DRAINING
    assert {world.submit().replica for _ in range(3)} == {"replica1"}
    assert world.router.resume("replica0").state is ReplicaState.READY
    assert {world.submit().replica for _ in range(3)} == {"replica0", "replica1"}


def test_a_drained_replica_starts_nothing_even_where_it_is_the_only_one(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    world.router.drain("replica0", 5)
    assert world.claim("replica0") is None
    world.router.resume("replica0")
    claimed = world.claim("replica0")
    assert claimed is not None
    assert claimed.id == request.id


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
    replica = world.registry.get("replica0")
    assert replica is not None
    assert replica.heartbeat.incarnation == newer
    assert replica.restarts == 1


def test_a_replica_long_gone_is_forgotten(world: World) -> None:
    world.start("replica0")
    world.clock.forward(3601)
    world.sweep.run()
    assert world.registry.all() == []


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
