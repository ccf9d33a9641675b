"""Which replica a request is given: by turn, by the work ahead of it, by its affinity key."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from redis import Redis

from configs.errors import QueueFull
from configs.settings import Settings
from routing.replica import ReplicaState
from routing.request import Request
from tests.integration.routing_world import World, parameters

BASE = 64 * 64 * 4  # steps x pixels of the world's request


@pytest.fixture
def world(settings: Settings, redis_client: Redis) -> World:
    return World(dataclasses.replace(settings, routing_policy="least_work"), redis_client)


@pytest.fixture
def in_turn(settings: Settings, redis_client: Redis) -> World:
    return World(settings, redis_client)


def _work(request: Request) -> int:
    return request.parameters.work()


def _mix(world: World) -> Counter[str]:
    """Submit twelve requests of cost 4, 1, 4, 1, ...; return the work of each replica."""
    given: Counter[str] = Counter()
    for number in range(12):
        steps = 16 if number % 2 == 0 else 4
        request = world.submit(parameters=parameters(num_inference_steps=steps))
        given[request.replica] += _work(request)
    return given


def _measure(world: World, **seconds: float) -> None:
    """Have each replica run one request, in so many seconds."""
    for name, took in seconds.items():
        for other in seconds:
            world.start(other, ReplicaState.READY if other == name else ReplicaState.LOADING)
        world.submit()
        world.run(name, took)
    for name in seconds:
        world.start(name)


def test_work_is_steps_by_pixels_by_frames_by_outputs() -> None:
    assert parameters().work() == BASE
    assert parameters(num_outputs_per_prompt=3).work() == 3 * BASE
    assert parameters(num_frames=5).work() == 5 * BASE
    assert parameters(image=("a.png",), strength=0.5).work() == BASE / 2
    assert parameters(image=("a.png",), strength=0.01).work() == BASE / 4
    assert parameters(scheduler="HeunDiscreteScheduler").work() == BASE * 7 / 4
    assert parameters(num_inference_steps=10**9, num_frames=10**6).work() == 10**12


def test_on_a_mix_of_costs_the_longest_line_has_less_work_than_by_turns(
    settings: Settings, redis_client: Redis
) -> None:
    """6 x 4 + 6 x 1 units: by turns all of cost 4 fall to one replica, 24 of the 30."""
    most = {}
    for policy in ("round_robin", "least_work"):
        prefix = f"{settings.redis_prefix}{policy}:"
        own = dataclasses.replace(settings, redis_prefix=prefix, routing_policy=policy)
        world = World(own, redis_client)
        for name in ("replica0", "replica1"):
            world.start(name)
        given = _mix(world)
        assert sum(given.values()) == 30 * BASE
        most[policy] = max(given.values())
    assert most == {"round_robin": 24 * BASE, "least_work": 15 * BASE}


def test_equal_replicas_take_equal_requests_in_turn(world: World) -> None:
    for name in ("replica0", "replica1", "replica2"):
        world.start(name)
    assert [world.submit().replica for _ in range(6)] == ["replica0", "replica1", "replica2"] * 2


def test_a_replica_three_times_as_fast_gets_three_times_the_work(world: World) -> None:
    _measure(world, replica0=1.0, replica1=3.0)
    given = Counter(world.submit().replica for _ in range(16))
    assert given == {"replica0": 12, "replica1": 4}


def test_what_a_running_request_has_still_to_do_counts(world: World) -> None:
    world.start("replica0")
    world.submit(parameters=parameters(num_inference_steps=16))
    claimed = world.claim("replica0")
    assert claimed is not None
    world.start("replica1")
    assert {world.submit().replica for _ in range(3)} == {"replica1"}
    world.claims.progress(claimed, 15, 16, 0.1)
    assert world.submit().replica == "replica0"


def test_an_edit_of_a_waiting_request_changes_the_work_of_its_line(world: World) -> None:
    world.start("replica0")
    heavy = world.submit(parameters=parameters(num_inference_steps=40))
    world.start("replica1")
    assert world.submit().replica == "replica1"
    world.records.edit(heavy, parameters(num_inference_steps=1), heavy.priority, timeout=None)
    assert world.submit().replica == "replica0"


def test_the_rate_follows_what_a_replica_does_now(world: World) -> None:
    _measure(world, replica0=9.0, replica1=1.0)
    for _ in range(60):
        _measure(world, replica0=1.0, replica1=1.0)
    given = Counter(world.submit().replica for _ in range(20))
    assert abs(given["replica0"] - given["replica1"]) <= 2


def test_moved_requests_go_to_the_replica_that_has_the_least_work(world: World) -> None:
    for name in ("replica0", "replica1", "replica2"):
        world.start(name)
    world.submit(parameters=parameters(num_inference_steps=4))  # replica0
    heavy = world.submit(parameters=parameters(num_inference_steps=100))
    light = [world.submit() for _ in range(2)]
    assert heavy.replica not in {request.replica for request in light}
    world.router.drain("replica0", 0)
    moved = [world.get(request.id) for request in world.records.newest()]
    assert {r.replica for r in moved if r.id != heavy.id}.isdisjoint({"replica0", heavy.replica})


@pytest.mark.parametrize("policy", ["round_robin", "least_work"])
def test_requests_of_one_key_go_to_one_replica(
    settings: Settings, redis_client: Redis, policy: str
) -> None:
    world = World(dataclasses.replace(settings, routing_policy=policy), redis_client)
    for number in range(4):
        world.start(f"replica{number}")
    keys = [f"user-{number}" for number in range(200)]
    homes = {key: world.submit(affinity_key=key).replica for key in keys}
    for key in keys[:30]:
        assert world.submit(affinity_key=key).replica == homes[key]
    assert all(20 < count < 90 for count in Counter(homes.values()).values()), Counter(homes)


def test_the_death_of_a_replica_moves_its_keys_only_and_they_come_home(in_turn: World) -> None:
    names = [f"replica{number}" for number in range(4)]
    for name in names:
        in_turn.start(name)
    keys = [f"user-{number}" for number in range(60)]
    homes = {key: in_turn.submit(affinity_key=key).replica for key in keys}
    in_turn.clock.forward(in_turn.settings.heartbeat_expiry_s + 1)
    for name in names[1:]:
        in_turn.beat(name)
    in_turn.sweep.run()
    moved = {key: in_turn.submit(affinity_key=key).replica for key in keys}
    assert {key for key in keys if moved[key] != homes[key]} == {
        key for key in keys if homes[key] == "replica0"
    }
    for request in in_turn.records.newest():
        assert request.replica == moved[request.affinity_key], "what was moved went the same way"
    in_turn.start("replica0")
    for key in keys:
        assert in_turn.submit(affinity_key=key).replica == homes[key]


def test_a_key_is_no_reason_to_be_refused(settings: Settings, redis_client: Redis) -> None:
    world = World(dataclasses.replace(settings, max_waiting_per_replica=2), redis_client)
    world.start("replica0")
    world.start("replica1")
    replicas = Counter(world.submit(affinity_key="me").replica for _ in range(4))
    assert replicas == {"replica0": 2, "replica1": 2}
    with pytest.raises(QueueFull):
        world.submit(affinity_key="me")


def test_a_key_does_not_hold_to_a_replica_that_is_drained(in_turn: World) -> None:
    in_turn.start("replica0")
    in_turn.start("replica1")
    home = in_turn.submit(affinity_key="me").replica
    in_turn.router.drain(home, 0)
    assert in_turn.submit(affinity_key="me").replica != home
    in_turn.router.resume(home)
    assert in_turn.submit(affinity_key="me").replica == home


def test_keys_do_not_disturb_the_turns_of_the_others(in_turn: World) -> None:
    in_turn.start("replica0")
    in_turn.start("replica1")
    names = []
    for _ in range(4):
        names.append(in_turn.submit().replica)
        in_turn.submit(affinity_key="me")
    assert names == ["replica0", "replica1"] * 2


def test_requests_of_a_stage_are_capped_over_all_its_replicas(
    settings: Settings, redis_client: Redis
) -> None:
    world = World(dataclasses.replace(settings, max_waiting_per_stage=3), redis_client)
    world.start("replica0")
    world.start("replica1")
    world.start("replica2", stage=1)
    for _ in range(3):
        world.submit()
    with pytest.raises(QueueFull, match="queue of 'tiny' is full: 3 requests"):
        world.submit()
    assert world.submit(stage=1, model="other").replica == "replica2"
    assert world.claim("replica0") is not None
    world.submit()
    world.beat("replica1", ReplicaState.FAILED)
    with pytest.raises(QueueFull):
        world.submit()


def test_what_is_full_says_when_to_come_back_from_rate_and_queue(
    settings: Settings, redis_client: Redis
) -> None:
    world = World(dataclasses.replace(settings, max_waiting_per_replica=2), redis_client)
    world.start("replica0")
    for _ in range(2):
        world.submit()
    with pytest.raises(QueueFull) as unknown:
        world.submit()
    assert unknown.value.retry_after == 5.0
    world.run("replica0", 10.0)  # for 4 steps of 64 x 64
    world.submit(parameters=parameters(num_inference_steps=12))
    with pytest.raises(QueueFull) as known:
        world.submit()
    assert known.value.retry_after == pytest.approx((10 + 30) / 2)
    assert world.claim("replica0") is not None
    world.submit()
    with pytest.raises(QueueFull) as running:
        world.submit()
    assert running.value.retry_after == pytest.approx((10 + 30 + 10) / 3)
