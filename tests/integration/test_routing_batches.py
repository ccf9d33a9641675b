"""A freed slot goes first to a request that can share steps with what runs, within bounds."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from redis import Redis

from configs.settings import Settings
from routing.request import Priority, Request
from tests.integration.routing_world import SUCCESS, World, parameters

MOST = 3


@pytest.fixture
def world(settings: Settings, redis_client: Redis) -> World:
    """One replica of four slots."""
    own = dataclasses.replace(settings, max_overtaken=MOST)
    world = World(own, redis_client, capacity=4)
    world.start("replica0")
    return world


def _sized(world: World, width: int, **changes: object) -> Request:
    return world.submit(parameters=parameters(width=width), **changes)


def _widths(world: World, count: int) -> list[int]:
    """Claim so many; return their widths, in order."""
    claims = [world.claim("replica0") for _ in range(count)]
    return [claim.parameters.width for claim in claims if claim is not None]


def test_slots_are_filled_with_what_can_share_steps(world: World) -> None:
    for _ in range(4):
        _sized(world, 64)
        _sized(world, 96)
    assert _widths(world, 4) == [64, 64, 64, 64]


def test_a_request_is_overtaken_so_often_and_the_next_ones_then_follow_it(world: World) -> None:
    for _ in range(8):
        _sized(world, 64)
        _sized(world, 96)
    order = []
    running = []
    while (claim := world.claim("replica0")) is not None:
        order.append(claim.parameters.width)
        running.append(claim)
        if len(running) == 4:
            assert world.claims.finish(running.pop(0), SUCCESS)
    assert order[: MOST + 1] == [64] * (MOST + 1)
    assert sorted(order) == [64] * 8 + [96] * 8
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes < 8  # by turns it is 15


def test_neither_a_higher_priority_nor_one_that_must_start_soon_is_overtaken(world: World) -> None:
    _sized(world, 64)
    assert _widths(world, 1) == [64]
    _sized(world, 96, priority=Priority.HIGH)
    _sized(world, 64)
    assert _widths(world, 1) == [96]
    assert _widths(world, 1) == [64]
    _sized(world, 128, expires_in=60.0)
    _sized(world, 64)
    assert _widths(world, 2) == [128, 64]


def test_what_shares_with_nobody_draws_nothing_forward(world: World) -> None:
    alone = parameters(deterministic=True)
    world.submit(parameters=alone)
    assert world.claim("replica0") is not None
    _sized(world, 96)
    world.submit(parameters=alone)
    assert _widths(world, 2) == [96, 64]


def test_one_slot_and_a_bound_of_none_keep_the_order(
    settings: Settings, redis_client: Redis
) -> None:
    for number, (capacity, most) in enumerate(((1, 8), (4, 0))):
        prefix = f"{settings.redis_prefix}{number}:"
        own = dataclasses.replace(settings, redis_prefix=prefix, max_overtaken=most)
        world = World(own, redis_client, capacity=capacity)
        world.start("replica0")
        for width in (64, 96, 64):
            _sized(world, width)
        assert _widths(world, 3) == [64, 96, 64]


def test_of_the_queues_of_others_the_one_that_shares_steps_is_taken_too(world: World) -> None:
    for width in (64, 96, 64, 96):
        _sized(world, width)
    world.start("replica1")
    own = _sized(world, 96)
    assert own.replica == "replica1"
    world.clock.forward(1.0)  # replica0, which has room, has had its time to take them
    claims = [world.claim("replica1") for _ in range(4)]
    assert [claim.parameters.width for claim in claims if claim] == [96, 96, 96, 64]
