"""Blame: which request a crash counts against, and who runs alone after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis import Redis

from configs.settings import Settings
from routing.claims import MustRunAlone
from routing.request import Outcome, Request, Status
from tests.integration.routing_world import World


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


def test_handing_back_blames_nobody(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    world.start("replica1")
    move = world.claims.hand_back(claimed)
    assert move is not None
    assert (move.replica, move.attempt) == ("replica1", 2)
    assert world.get(request.id).crashes == 0
    assert world.claims.hand_back(claimed) is None


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
        world.claims.claim("replica0", world.incarnations["replica0"])
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
    assert world.claims.move_crashed(claims[0]) is not None
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
    world.records.cancel(requests[0].id)
    world.start("replica0")
    for claimed in claims:
        assert claimed is not None
        world.claims.move_crashed(claimed)
    assert _blamed(world, *requests) == [(Status.CANCELED, 0), (Status.QUEUED, 1)]


def test_a_suspect_runs_alone_and_is_not_blamed(world: World) -> None:
    world.start("replica0")
    suspect, other = world.submit(), world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.claims.hand_back(claimed, suspect=True) is not None
    beside = world.claim("replica0")
    assert beside is not None
    assert beside.id == suspect.id
    assert world.get(suspect.id).crashes == 0
    assert world.claim("replica0") is None
    world.claims.finish(beside, Outcome(Status.CANCELED))
    first = world.claim("replica0")
    assert first is not None
    assert first.id == other.id
