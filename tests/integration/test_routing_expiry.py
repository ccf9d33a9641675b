"""Expiry: a request that has not begun by the time it had to never runs."""

from __future__ import annotations

from routing.request import Status
from tests.integration.routing_world import World


def test_a_request_not_started_in_time_expires_and_never_runs(world: World) -> None:
    world.start("replica0")
    late, kept = world.submit(expires_in=5.0), world.submit()
    world.clock.forward(6)
    claimed = world.claim("replica0")
    assert claimed is not None
    assert claimed.id == kept.id
    record = world.get(late.id)
    assert record.status is Status.EXPIRED
    assert record.error is not None
    assert record.started_at is None


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
    world.records.edit(request, request.parameters, request.priority, timeout=None, expires_in=60.0)
    world.clock.forward(6)
    world.sweep.run()
    assert world.get(request.id).status is Status.QUEUED
