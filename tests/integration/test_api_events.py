"""The call that follows a request: what it tells, where it goes on, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from configs.settings import Settings
from routing.request import Outcome, Status
from tests.integration.api_world import Api, PlayedReplica, body_of, error_of
from tests.integration.event_reader import EventReader, reading

ApiOpener = Callable[[Settings], Api]


@contextmanager
def following(api: Api, request_id: str, last: str = "") -> Iterator[EventReader]:
    headers = {"Last-Event-ID": last} if last else {}
    answer = api.client.get(f"/v1/requests/{request_id}/events", headers=headers, buffered=False)
    with reading(answer) as events:
        yield events


@pytest.fixture
def api(api_settings: Settings, open_api: ApiOpener) -> Api:
    return open_api(api_settings).start()


def step(api: Api, request: Any, number: int) -> None:
    api.claims.progress(request, number, 20, 0.5)


def test_a_request_is_followed_from_the_line_to_its_end(api: Api, replica: PlayedReplica) -> None:
    first, second = api.submitted(seed=5), api.submitted()
    with following(api, second["id"]) as stream:
        queued = stream.next()
        assert (queued.name, queued.data["queue_position"]) == ("queued", 2)
        assert queued.data["replica"] == replica.name
        replica.succeed(replica.claim())
        request = replica.claim()
        assert request.id == second["id"] != first["id"]
        started = stream.next()
        assert (started.name, started.data) == ("started", {"replica": "replica0", "attempt": 1})
        step(api, request, 4)
        moved = stream.next()
        assert (moved.name, moved.data) == (
            "progress",
            {"step": 4, "steps": 20, "fraction": 0.2, "eta_s": 8.0},
        )
        replica.succeed(request)
        output, end = stream.rest()
    assert (output.name, output.data["index"]) == ("output", 0)
    assert output.data["url"] == f"/v1/requests/{request.id}/outputs/0"
    assert end.name == "succeeded"
    assert end.data == api.get(f"/v1/requests/{request.id}").json


@pytest.mark.parametrize("how", ["failed", "canceled"])
def test_the_last_event_is_named_after_the_end(api: Api, replica: PlayedReplica, how: str) -> None:
    api.submitted()
    request = replica.claim()
    with following(api, request.id) as stream:
        assert stream.next().name == "started"
        if how == "failed":
            replica.fail(request)
            (end,) = stream.rest()
            assert end.data["error"]["code"] == "generation_failed"
        else:
            assert api.post(f"/v1/requests/{request.id}/cancel").status_code == 202
            assert stream.next().name == "canceling"
            replica.stop(request)
            (end,) = stream.rest()
    assert end.name == how


def test_it_goes_on_after_the_last_event_that_was_seen(api: Api, replica: PlayedReplica) -> None:
    api.submitted()
    request = replica.claim()
    with following(api, request.id) as stream:
        stream.next()
        step(api, request, 1)
        seen = stream.next()
    other = api.submitted()
    for number in (2, 3):
        step(api, request, number)
    with following(api, request.id, last=seen.id) as stream:
        assert [stream.next().data["step"] for _ in range(2)] == [2, 3]
        replica.succeed(request)
        end = stream.rest()[-1]
    assert end.name == "succeeded"
    path = f"/v1/requests/{request.id}/events"
    assert api.get(path, Last_Event_ID=end.id).status_code == 204
    assert body_of(api.get(f"/v1/requests/{other['id']}"))["status"] == "queued"


def test_one_that_comes_late_gets_where_the_request_stands(
    api: Api, replica: PlayedReplica
) -> None:
    api.submitted()
    request = replica.claim()
    step(api, request, 7)
    with following(api, request.id) as stream:
        assert [stream.next().name for _ in range(2)] == ["started", "progress"]
    replica.succeed(request)
    with following(api, request.id) as stream:
        assert [event.name for event in stream.rest()] == ["output", "succeeded"]


def test_where_the_stream_of_changes_was_cut_the_present_is_told(
    api: Api, replica: PlayedReplica
) -> None:
    api.submitted()
    request = replica.claim()
    with following(api, request.id) as stream:
        seen = stream.next()
    step(api, request, 3)
    step(api, request, 9)
    keys = api.service.settings.redis_prefix + "changes"
    api.service.redis.xtrim(keys, maxlen=1, approximate=False)
    with following(api, request.id, last=seen.id) as stream:
        assert stream.next().name == "started"
        assert stream.next().data["step"] == 9


def test_an_edit_is_told_with_what_it_made_of_the_request(api: Api, replica: PlayedReplica) -> None:
    request = api.submitted()
    with following(api, request["id"]) as stream:
        stream.next()
        api.patch(request["id"], prompt="a blue square")
        edited = stream.next()
    assert edited.name == "edited"
    assert edited.data["parameters"]["prompt"] == "a blue square"


def test_a_preview_is_told_and_gone_at_the_end(api: Api, replica: PlayedReplica) -> None:
    api.submitted()
    request = replica.claim()
    with following(api, request.id) as stream:
        stream.next()
        api.claims.preview(request, 3, b"jpeg bytes")
        preview = stream.next()
        assert preview.name == "preview"
        assert preview.data == {"step": 3, "image": "data:image/jpeg;base64,anBlZyBieXRlcw=="}
    replica.succeed(request)
    assert api.service.records.preview(request.id) is None


def test_a_preview_of_a_claim_that_was_lost_counts_for_nothing(
    api: Api, replica: PlayedReplica
) -> None:
    api.submitted()
    request = replica.claim()
    api.claims.finish(request, Outcome(Status.CANCELED))
    api.claims.preview(request, 3, b"late")
    assert api.service.records.preview(request.id) is None


def test_a_request_removed_while_it_is_followed_ends_the_stream(
    api: Api, replica: PlayedReplica
) -> None:
    request = api.submitted()
    with following(api, request["id"]) as stream:
        stream.next()
        api.delete(f"/v1/requests/{request['id']}")
        assert [event.name for event in stream.rest()] == ["canceled"]


def test_a_api_that_closes_ends_its_streams(api: Api, replica: PlayedReplica) -> None:
    request = api.submitted()
    with following(api, request["id"]) as stream:
        stream.next()
        assert api.service.held_calls.count == 1
        api.service.held_calls.close()
        assert stream.rest() == []
    assert api.service.held_calls.count == 0


def test_streams_are_bounded_and_wrong_calls_refused(
    api_settings: Settings, open_api: ApiOpener
) -> None:
    api = open_api(replace(api_settings, max_long_polls=1)).start()
    api.replica().load()
    request = api.submitted()
    path = f"/v1/requests/{request['id']}/events"
    with following(api, request["id"]) as stream:
        stream.next()
        refused = api.get(path)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_waits")
    assert api.get("/v1/requests/req_none/events").status_code == 404
    wrong = api.get(path, Last_Event_ID="yesterday")
    assert wrong.status_code == 400
    assert error_of(wrong)["param"] == "Last-Event-ID"
    assert api.service.held_calls.count == 0
