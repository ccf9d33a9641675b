"""Calls that wait for the end of a request: what wakes them, how many there may be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from configs.settings import Settings
from tests.integration.api_world import (
    Api,
    PlayedReplica,
    body_of,
    error_of,
)
from tests.integration.conftest import ApiOpener
from tests.waiting import wait_until


def test_a_held_call_is_woken_by_the_end(api: Api, replica: PlayedReplica) -> None:
    api.start()
    request_id = api.submitted()["id"]
    claimed = replica.claim()
    with ThreadPoolExecutor() as pool:
        held = pool.submit(api.get, f"/v1/requests/{request_id}", Prefer="wait=30")
        wait_until(lambda: held_calls(api) == 1, 5, "the call to be held")
        replica.succeed(claimed)
        answer = held.result(timeout=5)
    assert answer.status_code == 200
    assert answer.headers["Preference-Applied"] == "wait=30"
    assert body_of(answer)["status"] == "succeeded"


def test_a_submit_that_waits_answers_200_with_the_end(api: Api, replica: PlayedReplica) -> None:
    api.start()
    with ThreadPoolExecutor() as pool:
        held = pool.submit(api.submit, {"Prefer": "wait=30"})
        wait_until(lambda: held_calls(api) == 1, 5, "the call to be held")
        replica.succeed(replica.claim())
        answer = held.result(timeout=5)
    assert answer.status_code == 200
    assert answer.headers["Preference-Applied"] == "wait=30"
    assert answer.headers["Location"] == f"/v1/requests/{body_of(answer)['id']}"
    assert body_of(answer)["status"] == "succeeded"


def test_a_wait_that_runs_out_answers_with_the_request_as_it_stands(
    api: Api, replica: PlayedReplica
) -> None:
    api.start()
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(api.submit, {"Prefer": "respond-async, wait=1"})
        wait_until(lambda: held_calls(api) == 1, 5, "the call to be held")
        answer = waits.result(timeout=10)
    assert answer.status_code == 202
    assert answer.headers["Preference-Applied"] == "wait=1"
    looked = api.get(answer.headers["Location"], Prefer="wait=1")
    assert looked.status_code == 200
    assert body_of(looked)["status"] == "queued"


def test_a_wait_is_cut_to_the_longest_allowed(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    replica.succeed(replica.claim())
    answer = api.get(f"/v1/requests/{request_id}", Prefer="wait=3600")
    assert answer.headers["Preference-Applied"] == "wait=60"
    assert "Preference-Applied" not in api.get(f"/v1/requests/{request_id}").headers
    unwaited = api.get(f"/v1/requests/{request_id}", Prefer="handling=strict")
    assert "Preference-Applied" not in unwaited.headers
    assert api.get(f"/v1/requests/{request_id}", Prefer="wait=soon").status_code == 400


def test_held_calls_are_bounded_and_hold_up_nobody_else(
    api_settings: Settings, open_api: ApiOpener
) -> None:
    api = open_api(replace(api_settings, max_long_polls=3)).start()
    replica = api.replica().load()
    path = f"/v1/requests/{api.submitted()['id']}"
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(api.get, path, Prefer="wait=30") for _ in range(3)]
        wait_until(lambda: held_calls(api) == 3, 5, "three held calls")
        refused = api.get(path, Prefer="wait=30")
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "too_many_waits"
        assert refused.headers["Retry-After"] == "1"
        assert api.get(path).status_code == 200
        accepted = api.submit({"Prefer": "wait=30"})
        assert accepted.status_code == 202
        assert "Preference-Applied" not in accepted.headers
        replica.succeed(replica.claim())
        assert [call.result(timeout=5).status_code for call in held] == [200] * 3
    wait_until(lambda: held_calls(api) == 0, 5, "no held call")


def test_a_api_that_closes_lets_its_held_calls_go(api: Api, replica: PlayedReplica) -> None:
    api.start()
    path = f"/v1/requests/{api.submitted()['id']}"
    with ThreadPoolExecutor() as pool:
        held = pool.submit(api.get, path, Prefer="wait=30")
        wait_until(lambda: held_calls(api) == 1, 5, "the call to be held")
        api.service.held_calls.close()
        answer = held.result(timeout=5)
    assert answer.status_code == 200
    assert body_of(answer)["status"] == "queued"


def test_a_call_held_for_a_removed_request_answers_404(api: Api, replica: PlayedReplica) -> None:
    api.start()
    path = f"/v1/requests/{api.submitted()['id']}"
    with ThreadPoolExecutor() as pool:
        held = pool.submit(api.get, path, Prefer="wait=30")
        wait_until(lambda: held_calls(api) == 1, 5, "the call to be held")
        assert api.delete(path).status_code == 204
        assert held.result(timeout=5).status_code == 404


def held_calls(api: Api) -> int:
    return api.service.held_calls.count
