"""Calls that wait for the end of a request: what wakes them, how many there may be."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from configs.settings import Settings
from tests.integration.api_world import (
    Door,
    PlayedReplica,
    body_of,
    error_of,
)
from tests.integration.conftest import OpenDoor
from tests.waiting import wait_until


def test_a_held_call_is_woken_by_the_end(door: Door, replica: PlayedReplica) -> None:
    door.start()
    request_id = door.submitted()["id"]
    claimed = replica.claim()
    with ThreadPoolExecutor() as pool:
        started = time.monotonic()
        held = pool.submit(door.get, f"/v1/requests/{request_id}", Prefer="wait=30")
        wait_until(lambda: held_calls(door) == 1, 5, "the call to be held")
        replica.succeed(claimed)
        answer = held.result(timeout=5)
    assert time.monotonic() - started < 5
    assert answer.status_code == 200
    assert answer.headers["Preference-Applied"] == "wait=30"
    assert body_of(answer)["status"] == "succeeded"


def test_a_submit_that_waits_answers_200_with_the_end(door: Door, replica: PlayedReplica) -> None:
    door.start()
    with ThreadPoolExecutor() as pool:
        held = pool.submit(door.submit, {"Prefer": "wait=30"})
        wait_until(lambda: held_calls(door) == 1, 5, "the call to be held")
        replica.succeed(replica.claim())
        answer = held.result(timeout=5)
    assert answer.status_code == 200
    assert answer.headers["Preference-Applied"] == "wait=30"
    assert answer.headers["Location"] == f"/v1/requests/{body_of(answer)['id']}"
    assert body_of(answer)["status"] == "succeeded"


def test_a_wait_that_runs_out_answers_with_the_request_as_it_stands(
    door: Door, replica: PlayedReplica
) -> None:
    door.start()
    started = time.monotonic()
    answer = door.submit({"Prefer": "respond-async, wait=1"})
    assert 0.9 < time.monotonic() - started < 4
    assert answer.status_code == 202
    assert answer.headers["Preference-Applied"] == "wait=1"
    looked = door.get(answer.headers["Location"], Prefer="wait=1")
    assert looked.status_code == 200
    assert body_of(looked)["status"] == "queued"


def test_a_wait_is_cut_to_the_longest_allowed(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    replica.succeed(replica.claim())
    answer = door.get(f"/v1/requests/{request_id}", Prefer="wait=3600")
    assert answer.headers["Preference-Applied"] == "wait=60"
    assert "Preference-Applied" not in door.get(f"/v1/requests/{request_id}").headers
    unwaited = door.get(f"/v1/requests/{request_id}", Prefer="handling=strict")
    assert "Preference-Applied" not in unwaited.headers
    assert door.get(f"/v1/requests/{request_id}", Prefer="wait=soon").status_code == 400


def test_held_calls_are_bounded_and_hold_up_nobody_else(
    api_settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(replace(api_settings, max_long_polls=3)).start()
    replica = door.replica().load()
    path = f"/v1/requests/{door.submitted()['id']}"
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(door.get, path, Prefer="wait=30") for _ in range(3)]
        wait_until(lambda: held_calls(door) == 3, 5, "three held calls")
        refused = door.get(path, Prefer="wait=30")
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "too_many_waits"
        assert refused.headers["Retry-After"] == "1"
        assert door.get(path).status_code == 200
        accepted = door.submit({"Prefer": "wait=30"})
        assert accepted.status_code == 202
        assert "Preference-Applied" not in accepted.headers
        replica.succeed(replica.claim())
        assert [call.result(timeout=5).status_code for call in held] == [200] * 3
    wait_until(lambda: held_calls(door) == 0, 5, "no held call")


def test_a_door_that_closes_lets_its_held_calls_go(door: Door, replica: PlayedReplica) -> None:
    door.start()
    path = f"/v1/requests/{door.submitted()['id']}"
    with ThreadPoolExecutor() as pool:
        held = pool.submit(door.get, path, Prefer="wait=30")
        wait_until(lambda: held_calls(door) == 1, 5, "the call to be held")
        door.service.held_calls.close()
        answer = held.result(timeout=5)
    assert answer.status_code == 200
    assert body_of(answer)["status"] == "queued"


def test_a_call_held_for_a_removed_request_answers_404(door: Door, replica: PlayedReplica) -> None:
    door.start()
    path = f"/v1/requests/{door.submitted()['id']}"
    with ThreadPoolExecutor() as pool:
        held = pool.submit(door.get, path, Prefer="wait=30")
        wait_until(lambda: held_calls(door) == 1, 5, "the call to be held")
        assert door.delete(path).status_code == 204
        assert held.result(timeout=5).status_code == 404


def held_calls(door: Door) -> int:
    return door.service.held_calls.count
