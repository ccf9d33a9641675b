"""Within a priority clients are served in turns, by the work that they ask for."""

from __future__ import annotations

import pytest

from routing.keys import Keys
from routing.request import Priority, Request
from tests.integration.routing_world import SUCCESS, World, parameters


@pytest.fixture(autouse=True)
def _ready(world: World) -> None:
    """One replica, which takes a second for a request of four steps."""
    world.start("replica0")
    world.submit()
    world.run("replica0", 1.0)


def _order(world: World) -> str:
    """Run all that waits; return whose each was, in order."""
    clients = ""
    while (claimed := world.claim("replica0")) is not None:
        clients += claimed.client or "-"
        world.clock.forward(1.0)
        world.beat("replica0")
        assert world.claims.finish(claimed, SUCCESS)
    return clients


def _submit(world: World, clients: str, **changes: object) -> list[Request]:
    return [world.submit(client=each.strip("-"), **changes) for each in clients]


def test_one_with_many_requests_does_not_stop_one_with_two(world: World) -> None:
    _submit(world, "aaaaaaaaaa")
    assert world.claim("replica0") is not None
    _submit(world, "bb")
    order = _order(world)
    assert order.count("b") == 2
    assert order.rindex("b") <= 4


def test_turns_are_weighted_by_work(world: World) -> None:
    _submit(world, "aaaa", parameters=parameters(num_inference_steps=12))
    _submit(world, "bbbbbbbbbbbb")
    order = _order(world)
    # By the end of the eighth both have had about as much of the replica.
    assert 1 <= order[:8].count("a") <= 3


def test_where_nobody_says_who_they_are_the_order_is_that_of_sending(world: World) -> None:
    sent = _submit(world, "----")
    assert [world.place(each.id) for each in sent] == [1, 2, 3, 4]
    assert world.redis.exists(Keys(world.settings.redis_prefix).clients(0)) == 0


def test_those_of_nobody_are_one_client_among_others(world: World) -> None:
    _submit(world, "a")
    _submit(world, "----------")
    _submit(world, "aa")
    assert _order(world).rindex("a") <= 5


def test_what_was_canceled_before_it_began_took_nothing(world: World) -> None:
    running, *waiting = _submit(world, "aaaaaaaaaa")
    assert world.claim("replica0") is not None
    for each in waiting:
        world.records.cancel(each.id)
    _submit(world, "ab")
    assert sorted(_order(world)) == ["a", "b"]
    ahead = world.redis.zscore(Keys(world.settings.redis_prefix).clients(0), "a")
    assert ahead is not None
    assert float(ahead) - running.created_at == pytest.approx(2.0, abs=0.5)


def test_a_lower_priority_comes_later_whoever_sends_it(world: World) -> None:
    many = _submit(world, "a" * 700)  # some of which are put back by as long as may be
    low = _submit(world, "b", priority=Priority.LOW)[0]
    high = _submit(world, "b", priority=Priority.HIGH)[0]
    assert world.place(high.id) == 1
    early = [world.place(each.id) or 0 for each in many[:500]]
    assert max(early) < (world.place(low.id) or 0)
    changed = world.get(many[400].id)
    before = world.place(changed.id)
    for priority in (Priority.HIGH, Priority.NORMAL):
        changed = world.records.edit(
            world.get(changed.id), changed.parameters, priority, timeout=None
        )
    assert world.place(changed.id) == before
