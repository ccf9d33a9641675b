"""The request's road through real Redis: rotation, line, claim, cancel, edit, end, retention."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from redis import Redis

from configs.errors import Conflict, IdempotencyMismatch, NoReadyReplica, NotFound, QueueFull
from configs.settings import Settings
from routing.outcome import Failure, Outcome, Status
from routing.record import Priority, Request
from routing.replica import ReplicaState
from routing.request_store import CancelAnswer, RequestStore
from routing.submission import Limits
from tests.integration.routing_world import SUCCESS, World, parameters


@pytest.fixture
def world(settings: Settings, redis_client: Redis) -> World:
    return World(settings, redis_client)


def test_requests_go_round_the_ready_replicas_in_turn(world: World) -> None:
    for name in ("replica0", "replica1", "replica10", "replica2"):
        world.start(name)
    names = [world.submit().replica for _ in range(8)]
    assert names == ["replica0", "replica1", "replica2", "replica10"] * 2


def test_the_turn_is_one_for_all_api_processes(world: World, settings: Settings) -> None:
    """Forty submits from eight doors at once land evenly, none lost, none double."""
    world.start("replica0")
    world.start("replica1")
    landed: list[Request] = []

    def door() -> None:
        other = World(
            settings, Redis.from_url(settings.redis_url, decode_responses=True), world.clock
        )
        landed.extend(other.router.store.submit(other.submission())[0] for _ in range(5))

    threads = [threading.Thread(target=door) for _ in range(8)]
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
    small = RequestStore(
        world.redis, settings.redis_prefix, 600, Limits(per_replica=2), world.clock
    )
    for _ in range(2):
        small.submit(world.submission())
    refused = world.submission()
    with pytest.raises(QueueFull):
        small.submit(refused)
    with pytest.raises(NotFound):
        world.get(refused.id)


def test_claim_takes_the_line_in_order_and_marks_it_running(world: World) -> None:
    incarnation = world.start("replica0")
    first, second = world.submit(), world.submit()
    assert world.router.lists.places([first, second]) == [1, 2]
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
    world.router.store.edit(second, second.parameters, Priority.HIGH, timeout=None)
    assert world.place(second.id) == 1
    assert world.place(first.id) == 2


def test_an_edit_of_a_waiting_prompt_is_what_is_claimed(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    world.router.store.edit(request, parameters(prompt="a blue star"), Priority.NORMAL, timeout=9)
    claimed = world.claim("replica0")
    assert claimed is not None
    assert (claimed.parameters.prompt, claimed.timeout) == ("a blue star", 9)


def test_two_edits_of_the_same_reading_do_not_overwrite_each_other(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    world.router.store.edit(request, parameters(prompt="one"), Priority.NORMAL, timeout=None)
    with pytest.raises(Conflict, match="changed meanwhile"):
        world.router.store.edit(request, parameters(prompt="two"), Priority.NORMAL, timeout=None)
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
    assert world.router.claims.claim("replica0", former) is None
    world.sweep.run()
    assert world.get(request.id).attempt == 2
    assert world.router.claims.finish(claimed, SUCCESS) is False
    assert world.get(request.id).status is Status.QUEUED


def test_cancel_of_a_waiting_request_is_final_at_once(world: World) -> None:
    world.start("replica0")
    request, other = world.submit(), world.submit()
    assert world.router.store.cancel(request.id) is CancelAnswer.CANCELED
    assert world.get(request.id).status is Status.CANCELED
    claimed = world.claim("replica0")
    assert claimed is not None
    assert claimed.id == other.id


def test_cancel_of_a_running_request_is_a_wish_its_replica_reads(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.router.store.cancel(request.id) is CancelAnswer.STOPPING
    signals = world.router.claims.progress(claimed, 1, 4, 0.1)
    assert signals is not None
    assert signals.cancel
    assert world.router.claims.finish(claimed, Outcome(Status.CANCELED))
    assert world.router.store.cancel(request.id) is CancelAnswer.TERMINAL


def test_a_cancel_written_while_the_replica_is_dead_holds_when_it_comes_back(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    assert world.claim("replica0") is not None
    world.router.store.cancel(request.id)
    world.start("replica0")
    world.sweep.run()
    assert world.get(request.id).status is Status.CANCELED
    assert world.claim("replica0") is None


@pytest.mark.parametrize(
    "outcome", [SUCCESS, Outcome(Status.FAILED, error=Failure("generation_failed", "no"))]
)
def test_a_cancel_that_was_answered_holds_though_the_run_had_done_its_last_step(
    world: World, outcome: Outcome
) -> None:
    world.start("replica0")
    request, other = world.submit(), world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.router.store.cancel(request.id) is CancelAnswer.STOPPING
    for _ in range(2):  # its answer may get lost
        assert world.router.claims.finish(claimed, outcome) is False
    record = world.get(request.id)
    assert (record.status, record.outputs, record.error) == (Status.CANCELED, (), None)
    replica = world.router.registry.get("replica0")
    assert replica is not None
    assert (replica.running, replica.completed, replica.failed) == (0, 0, 0)
    assert world.run("replica0", 1.0).id == other.id


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


def test_finish_records_outputs_and_counts_once(world: World) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.router.claims.finish(claimed, SUCCESS)
    assert not world.router.claims.finish(claimed, Outcome(Status.FAILED, error=Failure("x", "y")))
    record = world.get(request.id)
    assert (record.status, record.outputs, record.step, record.steps) == (
        Status.SUCCEEDED,
        SUCCESS.outputs,
        4,
        4,
    )
    replica = world.router.registry.get("replica0")
    assert replica is not None
    assert (replica.completed, replica.failed, replica.running) == (1, 0, 0)


def test_the_same_key_and_body_are_one_request(world: World) -> None:
    world.start("replica0")
    same = {"idempotency_key": "k", "fingerprint": "f"}
    first = world.router.store.submit(world.submission(**same))
    again = world.router.store.submit(world.submission(**same))
    assert (first.created, again.created, again.request.id) == (True, False, first.request.id)
    assert (first.place, again.place) == (1, 1)
    with pytest.raises(IdempotencyMismatch, match=first.request.id):
        world.router.store.submit(world.submission(idempotency_key="k", fingerprint="g"))


def test_remove_of_an_ended_request_leaves_no_key(world: World, redis_client: Redis) -> None:
    world.start("replica0")
    request = world.submit(idempotency_key="k", fingerprint="f")
    world.router.remove(request.id)
    with pytest.raises(NotFound):
        world.get(request.id)
    left = [
        key for key in redis_client.keys(f"{world.settings.redis_prefix}*") if request.id in key
    ]
    assert left == []
    assert redis_client.get(f"{world.settings.redis_prefix}idempotency:k") is None


def test_a_running_request_that_is_removed_is_gone_at_once_and_leaves_nothing_later(
    world: World,
) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    world.router.remove(request.id)
    with pytest.raises(NotFound):
        world.get(request.id)
    assert list(world.router.lists.newest()) == []
    signals = world.router.claims.progress(claimed, 1, 4, 0.1)
    assert signals is not None
    assert signals.cancel
    # It may still have succeeded in that instant: its replica is told to remove the files.
    assert world.router.claims.finish(claimed, SUCCESS) is False
    assert not world.redis.exists(f"{world.settings.redis_prefix}request:{request.id}")


def test_records_and_files_go_together_after_their_retention(
    world: World, settings: Settings
) -> None:
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    name = f"{request.id}/1-0.png"
    world.router.outputs.write(name, b"png")
    world.router.claims.finish(claimed, SUCCESS)
    world.clock.forward(settings.retention_s - 1)
    world.sweep.run()
    assert world.get(request.id).status is Status.SUCCEEDED
    assert world.router.outputs.names(request.id) == [name]
    world.clock.forward(2)
    world.sweep.run()
    with pytest.raises(NotFound):
        world.get(request.id)
    assert world.router.outputs.names(request.id) == []


def test_the_list_is_newest_first_and_goes_on_from_a_cursor(world: World) -> None:
    world.start("replica0")
    ids = [world.submit().id for _ in range(5)]
    assert [request.id for request in world.router.lists.newest()] == ids[::-1]
    assert [request.id for request in world.router.lists.newest(after=ids[2])] == [ids[1], ids[0]]
    with pytest.raises(NotFound):
        next(world.router.lists.newest(after="req_nobody"))


def test_an_outcome_sent_again_because_its_answer_got_lost_still_holds(world: World) -> None:
    """Else its replica would take it for refused and remove the files of a success."""
    world.start("replica0")
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    assert world.router.claims.finish(claimed, SUCCESS)
    assert world.router.claims.finish(claimed, SUCCESS)
    replica = world.router.registry.get("replica0")
    assert replica is not None
    assert replica.completed == 1
    assert world.get(request.id).status is Status.SUCCEEDED
