"""The rotation: which replica gets a request, and who is asked at all."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest
from redis import Redis

from configs.errors import NoReadyReplica, NotFound, QueueFull
from configs.settings import Settings
from routing.records import Records
from routing.replica import ReplicaState
from routing.request import Request
from tests.integration.routing_world import World


def test_requests_go_round_the_ready_replicas_in_turn(world: World) -> None:
    for name in ("replica0", "replica1", "replica10", "replica2"):
        world.start(name)
    names = [world.submit().replica for _ in range(8)]
    assert names == ["replica0", "replica1", "replica2", "replica10"] * 2


def test_the_turn_is_one_for_all_api_processes(world: World, settings: Settings) -> None:
    """Forty submits from eight API processes at once land evenly, none lost, none double."""
    world.start("replica0")
    world.start("replica1")
    landed: list[Request] = []

    def api() -> None:
        other = World(
            settings, Redis.from_url(settings.redis_url, decode_responses=True), world.clock
        )
        landed.extend(other.records.submit(other.submission())[0] for _ in range(5))

    threads = [threading.Thread(target=api) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(request.replica for request in landed) == {"replica0": 20, "replica1": 20}
    assert len({request.id for request in landed}) == 40


@pytest.mark.parametrize(
    "state", [ReplicaState.LOADING, ReplicaState.DRAINING, ReplicaState.FAILED, ReplicaState.GONE]
)
def test_only_ready_replicas_are_in_the_rotation(world: World, state: ReplicaState) -> None:
    world.start("replica0", state)
    with pytest.raises(NoReadyReplica, match="No replica of 'tiny' is ready"):
        world.submit()
    world.start("replica1")
    assert {world.submit().replica for _ in range(3)} == {"replica1"}


def test_a_replica_whose_heartbeat_expired_gets_nothing(world: World, settings: Settings) -> None:
    world.start("replica0")
    world.start("replica1")
    world.clock.forward(settings.heartbeat_expiry_s / 2)
    world.beat("replica1")
    world.clock.forward(settings.heartbeat_expiry_s / 2 + 0.1)
    assert {world.submit().replica for _ in range(4)} == {"replica1"}


def test_stages_do_not_mix(world: World) -> None:
    world.start("replica0", stage=0)
    world.start("replica1", stage=1)
    assert [world.submit(stage=stage).replica for stage in (0, 1, 1, 0)] == [
        "replica0",
        "replica1",
        "replica1",
        "replica0",
    ]


def test_a_full_line_is_refused_and_records_nothing(world: World, settings: Settings) -> None:
    world.start("replica0")
    small = Records(replace(settings, max_waiting_per_replica=2), world.redis, world.clock)
    for _ in range(2):
        small.submit(world.submission())
    refused = world.submission()
    with pytest.raises(QueueFull):
        small.submit(refused)
    with pytest.raises(NotFound):
        world.get(refused.id)
