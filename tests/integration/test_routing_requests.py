"""The request's road through real Redis: line, claim, edit, end, retention."""

from __future__ import annotations

import pytest

from configs.errors import Conflict, IdempotencyMismatch, NotFound
from configs.settings import Settings
from routing.request import Failure, Outcome, Priority, Status
from tests.integration.routing_world import SUCCESS, World, parameters


def test_claim_takes_the_line_in_order_and_marks_it_running(world: World) -> None:
    incarnation = world.start("replica0")
    first, second = world.submit(), world.submit()
    assert world.records.queue_positions([first, second]) == [1, 2]
    claimed = world.claim("replica0")
    assert claimed is not None
    assert (claimed.id, claimed.status, claimed.owner) == (first.id, Status.RUNNING, incarnation)
    assert claimed.started_at == world.clock.now
    assert world.place(second.id) == 1


def test_priorities_go_first_and_a_low_one_does_not_wait_for_ever(
    world: World, settings: Settings
) -> None:
    world.start("replica0")
    low, normal, high = (
        world.submit(priority=p) for p in (Priority.LOW, Priority.NORMAL, Priority.HIGH)
    )
    world.clock.forward(settings.priority_age_s)
    world.beat("replica0")
    late = world.submit(priority=Priority.NORMAL)
    order = [claimed.id for _ in range(4) if (claimed := world.claim("replica0"))]
    assert order == [high.id, normal.id, low.id, late.id]


def test_raising_a_waiting_request_moves_it_up(world: World) -> None:
    world.start("replica0")
    first, second = world.submit(), world.submit()
    world.records.edit(second, second.parameters, Priority.HIGH, timeout=None)
    assert world.place(second.id) == 1
    assert world.place(first.id) == 2


def test_an_edit_of_a_waiting_prompt_is_what_is_claimed(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    world.records.edit(request, parameters(prompt="a blue star"), Priority.NORMAL, timeout=9)
    claimed = world.claim("replica0")
    assert claimed is not None
    assert (claimed.parameters.prompt, claimed.timeout) == ("a blue star", 9)


def test_two_edits_of_the_same_reading_do_not_overwrite_each_other(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    world.records.edit(request, parameters(prompt="one"), Priority.NORMAL, timeout=None)
    with pytest.raises(Conflict, match="changed meanwhile"):
        world.records.edit(request, parameters(prompt="two"), Priority.NORMAL, timeout=None)
    assert world.get(request.id).parameters.prompt == "one"


def test_a_second_claim_of_a_delivered_wake_up_finds_nothing(world: World) -> None:
    world.start("replica0")
    world.submit()
    assert world.claim("replica0") is not None
    assert world.claim("replica0") is None


def test_a_former_incarnation_can_neither_claim_nor_finish(world: World) -> None:
    former = world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    world.start("replica0")
    world.submit()
    assert world.claims.claim("replica0", former) is None
    world.sweep.run()
    assert world.get(request.id).attempt == 2
    assert not world.claims.finish(claimed, SUCCESS)
    assert world.get(request.id).status is Status.QUEUED


def test_finish_records_outputs_and_counts_once(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.claims.finish(claimed, SUCCESS)
    assert not world.claims.finish(claimed, Outcome(Status.FAILED, error=Failure("x", "y")))
    record = world.get(request.id)
    assert (record.status, record.outputs, record.step, record.steps) == (
        Status.SUCCEEDED,
        SUCCESS.outputs,
        4,
        4,
    )
    replica = world.registry.get("replica0")
    assert replica is not None
    assert (replica.completed, replica.failed, replica.running) == (1, 0, 0)


def test_the_same_key_and_body_are_one_request(world: World) -> None:
    world.start("replica0")
    same = {"idempotency_key": "k", "fingerprint": "f"}
    first = world.records.submit(world.submission(**same))
    again = world.records.submit(world.submission(**same))
    assert (first.created, again.created, again.request.id) == (True, False, first.request.id)
    assert (first.queue_position, again.queue_position) == (1, 1)
    with pytest.raises(IdempotencyMismatch, match=first.request.id):
        world.records.submit(world.submission(idempotency_key="k", fingerprint="g"))


def test_records_and_files_go_together_after_their_retention(
    world: World, settings: Settings
) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    name = f"{request.id}/1-0.png"
    world.outputs.write(name, b"png")
    world.claims.finish(claimed, SUCCESS)
    world.clock.forward(settings.retention_s - 1)
    world.sweep.run()
    assert world.get(request.id).status is Status.SUCCEEDED
    assert world.outputs.names(request.id) == [name]
    world.clock.forward(2)
    world.sweep.run()
    with pytest.raises(NotFound):
        world.get(request.id)
    assert world.outputs.names(request.id) == []


def test_the_list_is_newest_first_and_goes_on_from_a_cursor(world: World) -> None:
    world.start("replica0")
    ids = [world.submit().id for _ in range(5)]
    assert [request.id for request in world.records.newest()] == ids[::-1]
    assert [request.id for request in world.records.newest(after=ids[2])] == [ids[1], ids[0]]
    with pytest.raises(NotFound):
        next(world.records.newest(after="req_nobody"))


def test_an_outcome_sent_again_because_its_answer_got_lost_still_holds(world: World) -> None:
    """Else its replica would take it for refused and remove the files of a success."""
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.claims.finish(claimed, SUCCESS)
    assert world.claims.finish(claimed, SUCCESS)
    replica = world.registry.get("replica0")
    assert replica is not None
    assert replica.completed == 1
    assert world.get(request.id).status is Status.SUCCEEDED
