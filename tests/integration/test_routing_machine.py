"""The record's state machine, explored: any order of calls keeps each request in one place."""

from __future__ import annotations

import dataclasses
import math
import secrets
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from configs.errors import Conflict, IdempotencyMismatch, NotFound
from configs.parameters import TEXT_TO_IMAGE, TEXT_TO_VIDEO
from configs.settings import Settings
from routing.keys import Keys
from routing.replica import Command, ReplicaState
from routing.request import Failure, Outcome, Output, Priority, Request, Status
from tests.integration.routing_world import MODEL, STAGE, World, parameters

TASKS = (TEXT_TO_IMAGE, TEXT_TO_VIDEO)
REPLICAS = ("replica0", "replica1", "replica2")
OUTCOMES = (
    Outcome(Status.SUCCEEDED, (Output("x/1-0.png", "image/png", 64, 64, 1, 1, "00"),)),
    Outcome(Status.FAILED, error=Failure("generation_failed", "no")),
    Outcome(Status.CANCELED),
)


class RecordMachine(RuleBasedStateMachine):
    """Clients, replicas, crashes and the sweep, in any order."""

    base: ClassVar[Settings]
    redis: ClassVar[Redis]
    requests = Bundle("requests")
    claims = Bundle("claims")

    policy: ClassVar[str]
    attempts: ClassVar[int]
    capacity: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        prefix = f"{self.base.redis_prefix}{secrets.token_hex(4)}:"
        own = dataclasses.replace(
            self.base, redis_prefix=prefix, routing_policy=self.policy, max_attempts=self.attempts
        )
        self.world = World(own, self.redis, capacity=self.capacity)
        self.redis_keys = Keys(prefix)
        self.keys: dict[str, tuple[str, str]] = {}
        for name in REPLICAS:
            self.world.start(name)
        self.ends: dict[str, tuple[Status, int]] = {}
        self.fields: dict[str, dict[str, str]] = {}
        self.known: dict[str, Request] = {}
        self.alive: set[str] = set()
        self.successes: dict[str, int] = {}

    def _beat_all(self) -> None:
        for name in REPLICAS:
            self.world.beat(name)

    @rule(
        target=requests,
        priority=st.sampled_from(list(Priority)),
        expires_in=st.sampled_from([None, 2.0]),
        affinity_key=st.sampled_from(["", "", "a", "b"]),
        client=st.sampled_from(["", "", "x", "y"]),
        steps=st.sampled_from([1, 4, 16]),
        task=st.sampled_from(TASKS),
    )
    def submit(
        self,
        priority: Priority,
        expires_in: float | None,
        affinity_key: str,
        client: str,
        steps: int,
        task: str,
    ) -> str:
        self._beat_all()
        request = self.world.submit(
            priority=priority,
            expires_in=expires_in,
            affinity_key=affinity_key,
            client=client,
            parameters=parameters(num_inference_steps=steps, task=task),
        )
        self.alive.add(request.id)
        return request.id

    @rule(target=requests, key=st.sampled_from("xy"), body=st.sampled_from("12"))
    def submit_with_key(self, key: str, body: str) -> object:
        """One key is one request, however often it comes; removed, it is free again."""
        self._beat_all()
        new = self.world.submission(idempotency_key=key, fingerprint=body)
        known = self.keys.get(key)
        if known is not None and known[0] in self.alive and known[1] != body:
            with pytest.raises(IdempotencyMismatch):
                self.world.records.submit(new)
            return multiple()
        accepted = self.world.records.submit(new)
        if known is not None and known[0] in self.alive:
            assert (accepted.created, accepted.request.id) == (False, known[0])
            return multiple()
        assert accepted.created
        self.alive.add(new.id)
        self.keys[key] = (new.id, body)
        return new.id

    @rule(target=claims, name=st.sampled_from(REPLICAS))
    def claim(self, name: str) -> object:
        """A replica with room gets something as long as anything waits that it may run."""
        may = self._may_run(name)
        claimed = self.world.claim(name)
        assert (claimed is not None) >= bool(may), may
        return multiple() if claimed is None else claimed

    def _may_run(self, name: str) -> list[str]:
        """The waiting requests of the stage that nothing keeps from this replica."""
        running = self.redis.smembers(self.redis_keys.running(name))
        if any(self._blamed(str(each)) for each in running):
            return []
        own = self.redis.zrange(self.redis_keys.waiting(name), 0, 0)
        if own and running and self._blamed(str(own[0])):
            return []  # its own queue waits until it can run alone
        now = self.world.clock.now
        return [
            request.id
            for request in self.known.values()
            if request.status is Status.QUEUED
            and not (running and self._blamed(request.id))
            and float(self.fields[request.id]["held_until"] or 0) <= now
            and (self.fields[request.id].get("begun") or (request.start_by or math.inf) > now)
            and (request.replica == name or not self._left_alone(request))
        ]

    def _left_alone(self, request: Request) -> bool:
        """Whether it is new and its own replica has room, to which its wake-up is on the way."""
        replica = self.world.registry.find(request.replica)
        room = replica.state is ReplicaState.READY and replica.running < self.capacity
        return room and self.world.clock.now - request.created_at < 1

    def _blamed(self, request_id: str) -> bool:
        return self.redis.hmget(self._key(request_id), "crashes", "suspect") != ["0", None]

    @rule(claimed=claims, outcome=st.sampled_from(OUTCOMES))
    def finish(self, claimed: Request, outcome: Outcome) -> None:
        """Also finishes what was finished, moved or removed before: that must count for nothing."""
        before = self.world.get(claimed.id) if claimed.id in self.alive else None
        holds = bool(self.world.claims.finish(claimed, outcome))
        if before is not None and before.is_terminal:
            # Only the same outcome of the same claim, sent again, is told that it holds.
            same = (before.status, before.attempt, before.owner)
            assert holds is (same == (outcome.status, claimed.attempt, claimed.owner))
        elif holds and outcome.status is Status.SUCCEEDED:
            self.successes[claimed.id] = self.successes.get(claimed.id, 0) + 1

    @rule(claimed=claims, suspect=st.booleans())
    def hand_back(self, claimed: Request, suspect: bool) -> None:
        self.world.claims.hand_back(claimed, suspect=suspect)

    @rule(claimed=claims)
    def blame(self, claimed: Request) -> None:
        """Its replica says itself that the only request it ran has broken it."""
        self.world.claims.move_crashed(claimed)

    @rule(claimed=claims, step=st.integers(0, 4))
    def progress(self, claimed: Request, step: int) -> None:
        signals = self.world.claims.progress(claimed, step, 4, 0.1)
        if signals is not None:
            assert self.world.redis.hget(self._key(claimed.id), "owner") == claimed.owner

    @rule(request_id=requests)
    def cancel(self, request_id: str) -> None:
        if request_id in self.alive:
            self.world.records.cancel(request_id)

    @rule(
        request_id=requests,
        priority=st.sampled_from(list(Priority)),
        steps=st.sampled_from([1, 16]),
        expires_in=st.sampled_from([None, 3.0, 9.0]),
        task=st.sampled_from(TASKS),
    )
    def edit(
        self, request_id: str, priority: Priority, steps: int, expires_in: float | None, task: str
    ) -> None:
        if request_id not in self.alive:
            return
        request = self.world.get(request_id)
        if request.status is not Status.QUEUED:
            stale = dataclasses.replace(request, status=Status.QUEUED)
            with pytest.raises(Conflict):
                self.world.records.edit(stale, parameters(), priority, timeout=None)
        else:
            edited = self.world.records.edit(
                request,
                parameters(prompt="new", num_inference_steps=steps, task=task),
                priority,
                timeout=None,
                expires_in=expires_in,
            )
            assert edited.parameters.prompt == "new"
            assert edited.replica == request.replica

    @rule(request_id=consumes(requests))
    def remove(self, request_id: str) -> None:
        self.world.records.cancel(request_id, remove=True)
        self.alive.discard(request_id)
        self.ends.pop(request_id, None)
        with pytest.raises(NotFound):
            self.world.get(request_id)

    @rule(name=st.sampled_from(REPLICAS))
    def crash_and_restart(self, name: str) -> None:
        self.world.start(name)

    @rule(name=st.sampled_from(REPLICAS))
    def die(self, name: str) -> None:
        self.world.clock.forward(self.world.settings.heartbeat_expiry_s + 0.1)
        for other in REPLICAS:
            if other != name:
                self.world.beat(other)

    @rule(seconds=st.sampled_from([0.5, 2.5]))
    def pass_time(self, seconds: float) -> None:
        self.world.clock.forward(seconds)

    @rule()
    def sweep(self) -> None:
        assert self.world.sweep.run()

    @rule(name=st.sampled_from(REPLICAS))
    def drain_and_resume(self, name: str) -> None:
        self.world.registry.command(name, Command.DRAIN)
        assert self.world.claim(name) is None
        self.world.registry.command(name, Command.RESUME)

    @rule(name=st.sampled_from(REPLICAS), comes_back=st.booleans())
    def restart(self, name: str, comes_back: bool) -> None:
        """The process that is to end takes nothing more; the next one, or a resume, does."""
        asked = self.world.registry.command(name, Command.RESTART)
        if asked == "done":
            assert self.world.claim(name) is None
            assert self.world.beat(name) is ReplicaState.DRAINING
        if comes_back:
            self.world.start(name)
        else:
            self.world.registry.command(name, Command.RESUME)
        assert self.world.beat(name) is ReplicaState.READY

    def _key(self, request_id: str) -> str:
        return self.redis_keys.request(request_id)

    @invariant()
    def everything_holds(self) -> None:
        """All that must be true after each step, of records that are read once."""
        ids = sorted(self.alive)
        pipeline = self.redis.pipeline(transaction=False)
        for request_id in ids:
            pipeline.hgetall(self._key(request_id))
        self.fields = dict(zip(ids, pipeline.execute(), strict=True))
        self.known = {each: Request.from_hash(found) for each, found in self.fields.items()}
        self.who_was_in_a_crash_runs_alone()
        self.crashes_come_to_an_end()
        self.each_request_is_in_exactly_one_place()
        self.the_lists_hold_what_the_records_say()
        self.the_work_of_a_line_is_that_of_its_requests()
        self.what_any_replica_may_take_is_what_waits_and_is_not_held()
        self.exactly_those_that_may_expire_have_a_deadline()
        self.nobody_is_overtaken_for_ever()
        self.an_end_is_final()

    def who_was_in_a_crash_runs_alone(self) -> None:
        for name in REPLICAS:
            running = self.redis.smembers(self.redis_keys.running(name))
            assert len(running) <= 1 or not any(self._blamed(str(each)) for each in running)

    def crashes_come_to_an_end(self) -> None:
        """One in company fails nobody, but who was in it runs alone, and the last one fails."""
        most = self.world.settings.max_attempts
        for request in self.known.values():
            assert request.crashes <= max(most, 2)
            if request.status in {Status.QUEUED, Status.RUNNING}:
                assert request.crashes < max(most, 2)

    def each_request_is_in_exactly_one_place(self) -> None:
        keys = self.redis_keys
        waiting = {name: set(self.redis.zrange(keys.waiting(name), 0, -1)) for name in REPLICAS}
        running = {name: set(self.redis.smembers(keys.running(name))) for name in REPLICAS}
        ended = set(self.redis.zrange(keys.finished(), 0, -1))
        for request_id, request in self.known.items():
            places = [f"waiting {n}" for n, ids in waiting.items() if request_id in ids]
            places += [f"running {n}" for n, ids in running.items() if request_id in ids]
            places += ["ended"] if request_id in ended else []
            expected = {
                Status.QUEUED: f"waiting {request.replica}",
                Status.RUNNING: f"running {request.replica}",
            }.get(request.status, "ended")
            assert places == [expected], (request_id, request.status, places)

    def the_lists_hold_what_the_records_say(self) -> None:
        lists, keys = self.world.records, self.redis_keys
        records = sorted(
            self.known.values(),
            key=lambda request: (request.created_at, request.id),
            reverse=True,
        )
        for model in (None, MODEL):
            assert [r.id for r in lists.newest(model=model)] == [r.id for r in records]
            for kind in ("image", "video"):
                of_kind = [r.id for r in records if r.parameters.kind == kind]
                assert [r.id for r in lists.of_kind(kind, at_once=2)] == of_kind
                oldest = [r.id for r in lists.of_kind(kind, oldest_first=True, at_once=2)]
                assert oldest == of_kind[::-1]
                assert self.redis.zcard(keys.by_kind(kind)) == len(of_kind)
            for status in Status:
                expected = [r.id for r in records if r.status is status]
                listed = lists.newest(status=status, model=model, at_once=2)
                assert [r.id for r in listed] == expected
                # What is left in an index must not be more than what is shown.
                key = keys.by_status_and_model(status, model) if model else keys.by_status(status)
                assert self.redis.zcard(key) == len(expected)

    def the_work_of_a_line_is_that_of_its_requests(self) -> None:
        for name in REPLICAS:
            waiting = self.world.claims.waiting_at(name)
            kept = self.redis.get(self.redis_keys.work(name))
            assert int(kept or 0) == sum(request.parameters.work() for request in waiting)
            assert (kept is None) is (not waiting)

    def what_any_replica_may_take_is_what_waits_and_is_not_held(self) -> None:
        keys = self.redis_keys
        spare: Any = self.redis.zrange(keys.spare(STAGE), 0, -1, withscores=True)
        held: Any = self.redis.zrange(keys.held(STAGE), 0, -1)
        waiting = [r for r in self.known.values() if r.status is Status.QUEUED]
        assert {r.id for r in waiting} == {each for each, _ in spare} | set(held)
        assert not {each for each, _ in spare} & set(held)
        scores = {r.id: r.score for r in waiting if r.id not in held}
        assert dict(spare) == pytest.approx(scores)
        assert all(r.affinity_key for r in waiting if r.id in held)

    def exactly_those_that_may_expire_have_a_deadline(self) -> None:
        pairs: Any = self.redis.zrange(self.redis_keys.deadlines(), 0, -1, withscores=True)
        expected = {
            request.id: request.start_by
            for request in self.known.values()
            if request.status is Status.QUEUED
            and request.start_by is not None
            and self.fields[request.id].get("begun") != "1"
        }
        assert dict(pairs) == pytest.approx(expected)

    def nobody_is_overtaken_for_ever(self) -> None:
        for fields in self.fields.values():
            assert int(fields.get("overtaken") or 0) <= self.world.settings.max_overtaken

    def an_end_is_final(self) -> None:
        for request_id, request in self.known.items():
            if request.is_terminal:
                seen = self.ends.setdefault(request_id, (request.status, request.attempt))
                assert seen == (request.status, request.attempt)
                assert bool(request.outputs) is (request.status is Status.SUCCEEDED)
        assert all(count == 1 for count in self.successes.values())

    def teardown(self) -> None:
        """Let everything run to its end: nothing is stuck, nothing is left over."""
        for name in REPLICAS:
            self.world.start(name)
        self.world.sweep.run()
        for name in REPLICAS:
            while (claimed := self.world.claim(name)) is not None:
                self.world.claims.finish(claimed, OUTCOMES[0])
        for request_id in self.alive:
            assert self.world.get(request_id).is_terminal
        for name in REPLICAS:
            assert self.world.claims.running_at(name) == []
        leftovers = self.redis.keys(f"{self.world.settings.redis_prefix}request:*")
        assert len(leftovers) == len(self.alive)
        for key in self.redis.scan_iter(f"{self.world.settings.redis_prefix}*"):
            self.redis.delete(key)


@pytest.mark.parametrize(
    ("policy", "attempts", "capacity"), [("round_robin", 3, 4), ("least_work", 1, 1)]
)
def test_any_order_of_calls_keeps_the_record_right(
    settings: Settings, redis_client: Redis, policy: str, attempts: int, capacity: int
) -> None:
    machine = RecordMachine
    machine.base, machine.redis, machine.capacity = settings, redis_client, capacity
    machine.policy, machine.attempts = policy, attempts
    run_state_machine_as_test(
        RecordMachine,
        settings=hypothesis_settings(
            max_examples=24,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        ),
    )
