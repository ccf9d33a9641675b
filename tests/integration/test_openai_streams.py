"""Pictures as a stream of events, as OpenAI's image calls tell them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from routing.replica import ReplicaState
from routing.request import Request, Status
from tests.integration.api_world import ABILITIES, PIXELS, Api, PlayedReplica, error_of
from tests.integration.event_reader import EventReader, reading
from tests.pictures import data_url, picture
from tests.waiting import wait_until

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
SHOWING = replace(ABILITIES, tasks=("text-to-image", "image-to-image"), max_images=1, preview=True)
STEPS = 20


@pytest.fixture
def showing(api: Api) -> PlayedReplica:
    api.start()
    return api.replica().load(SHOWING)


@contextmanager
def streaming(api: Api, path: str = GENERATIONS, **fields: Any) -> Iterator[EventReader]:
    body: dict[str, Any] = {"prompt": "a red circle", "stream": True, **fields}
    if path == EDITS:
        form = {name: str(value).lower() for name, value in body.items()}
        file = (io.BytesIO(picture(48, 32)), "red.png")
        answer = api.client.post(path, data={**form, "image": file}, buffered=False)
    else:
        answer = api.client.post(path, json=body, buffered=False)
    with reading(answer) as events:
        yield events


def show(api: Api, request: Request, step: int) -> None:
    claims = api.claims
    claims.progress(request, step, STEPS, 0.5)
    claims.preview(request, step, f"step {step}".encode())


@pytest.mark.parametrize(
    ("path", "kind"), [(GENERATIONS, "image_generation"), (EDITS, "image_edit")]
)
def test_previews_come_first_and_then_the_picture(
    api: Api, showing: PlayedReplica, path: str, kind: str
) -> None:
    with streaming(api, path, partial_images=2, size="96x64", quality="high") as events:
        request = showing.claim()
        assert request.parameters.preview
        show(api, request, 2)  # too early for one of two
        for index, step in enumerate((7, 14)):
            show(api, request, step)
            partial = events.next()
            assert partial.name == partial.data.pop("type") == f"{kind}.partial_image"
            assert base64.b64decode(partial.data.pop("b64_json")) == f"step {step}".encode()
            assert partial.data.pop("created_at") > 0
            assert partial.data == {
                "partial_image_index": index,
                "size": "96x64",
                "output_format": "jpeg",
                "quality": "high",
                "background": "opaque",
            }
        show(api, request, 18)
        showing.succeed(request)
        (completed,) = events.rest()
    assert completed.name == completed.data["type"] == f"{kind}.completed"
    assert base64.b64decode(completed.data["b64_json"]) == PIXELS
    assert completed.data["id"] == request.id
    assert (completed.data["size"], completed.data["output_format"]) == ("96x64", "png")
    assert completed.data["usage"]["total_tokens"] == 0
    assert completed.data["metrics"]["stage_durations"]["denoise"] == 0.5
    assert completed.data["seed"] == request.parameters.seed
    assert completed.data["warnings"] == ["quality has no meaning here and was ignored"]


def test_each_picture_has_an_event(api: Api, showing: PlayedReplica) -> None:
    with streaming(api, n=2, seed=5) as events:
        request = showing.claim()
        assert not request.parameters.preview
        showing.succeed(request)
        completed = events.rest()
    assert [event.name for event in completed] == ["image_generation.completed"] * 2
    assert [(event.data["output_index"], event.data["seed"]) for event in completed] == [
        (0, 5),
        (1, 6),
    ]


def test_a_model_without_previews_says_so(api: Api) -> None:
    replica = api.start().replica().load()
    with streaming(api, partial_images=3) as events:
        request = replica.claim()
        assert not request.parameters.preview
        replica.succeed(request)
        (completed,) = events.rest()
    assert completed.data["warnings"] == [
        "partial_images was ignored: this model cannot show previews"
    ]


def test_an_end_other_than_success_is_an_event(api: Api, showing: PlayedReplica) -> None:
    with streaming(api) as events:
        request = showing.claim()
        showing.fail(request)
        (error,) = events.rest()
    assert error.name == error.data["type"] == "error"
    assert error.data["error"] == {
        "message": f"Request {request.id} failed: The pipeline said no.",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }
    with streaming(api) as events:
        showing.stop(showing.claim())
        (error,) = events.rest()
    assert error.data["error"]["code"] == "canceled"


def test_a_request_removed_meanwhile_is_an_event(api: Api, showing: PlayedReplica) -> None:
    with streaming(api) as events:
        request = showing.claim()
        assert api.delete(f"/v1/requests/{request.id}").status_code == 204
        showing.stop(request)
        (error,) = events.rest()
    assert error.data["error"]["code"] == "not_found"


def test_a_closing_api_says_so_and_cancels(api: Api, showing: PlayedReplica) -> None:
    with streaming(api) as events:
        request = showing.claim()
        api.service.held_calls.close()
        (error,) = events.rest()
    assert error.data["error"]["code"] == "unavailable"
    assert api.service.records.get(request.id).cancel


def test_a_client_that_goes_cancels(api: Api, showing: PlayedReplica) -> None:
    with streaming(api, partial_images=1) as events:
        request = showing.claim()
        show(api, request, 10)
        events.next()
    assert api.service.records.get(request.id).cancel
    showing.stop(request)
    with streaming(api):
        waiting = wait_until(lambda: api.claims.waiting_at(showing.name), 10, "the request")
    assert api.service.records.get(waiting[0].id).status is Status.CANCELED


def test_what_is_wrong_before_the_stream_has_its_status(api: Api, showing: PlayedReplica) -> None:
    body = {"prompt": "a", "stream": True, "partial_images": 1}
    key = {"Idempotency-Key": "k"}
    with reading(api.client.post(GENERATIONS, json=body, headers=key, buffered=False)) as events:
        showing.fail(showing.claim())
        assert [event.name for event in events.rest()] == ["error"]
    again = api.client.post(GENERATIONS, json=body, headers=key)
    assert (again.status_code, error_of(again)["code"]) == (500, "generation_failed")
    showing.beat(ReplicaState.DRAINING)
    refused = api.client.post(GENERATIONS, json=body)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "no_ready_replica")


def test_with_a_key_it_outlives_its_client(api: Api, showing: PlayedReplica) -> None:
    body = {"prompt": "a", "stream": True}
    key = {"Idempotency-Key": "k"}
    with reading(api.client.post(GENERATIONS, json=body, headers=key, buffered=False)):
        request = showing.claim()
    assert not api.service.records.get(request.id).cancel
    showing.succeed(request)
    with reading(api.client.post(GENERATIONS, json=body, headers=key, buffered=False)) as events:
        (completed,) = events.rest()
    assert completed.data["id"] == request.id


def test_a_chat_comes_in_chunks(api: Api, showing: PlayedReplica) -> None:
    content = [{"text": "a red"}, {"type": "text", "text": "circle"}]
    body = {"messages": [{"role": "user", "content": content}], "stream": True, "n": 2, "seed": 5}
    answer = api.client.post("/v1/chat/completions", json=body, buffered=False)
    assert answer.mimetype == "text/event-stream"
    request = showing.claim()
    assert request.parameters.prompt == "a red circle"
    showing.succeed(request)
    first, *data = answer.get_data(as_text=True).strip().split("\n\n")
    assert first.startswith(":")
    data = [line.removeprefix("data: ") for line in data if not line.startswith(":")]
    assert data.pop() == "[DONE]"
    picture, end = map(json.loads, data)
    for chunk in (picture, end):
        assert (chunk["id"], chunk["model"]) == (request.id, "tiny")
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["usage"]["completion_tokens"] == 2
    url = data_url(PIXELS)
    assert picture["choices"] == [
        {
            "index": 0,
            "delta": {
                "role": "assistant",
                "content": f"![seed 5]({url})\n\n![seed 6]({url})",
            },
            "finish_reason": None,
        }
    ]
    assert end["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]

    answer = api.client.post("/v1/chat/completions", json=body, buffered=False)
    showing.fail(showing.claim())
    *_, error, done = answer.get_data(as_text=True).strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "generation_failed"

    answer = api.client.post("/v1/chat/completions", json=body, buffered=False)
    request = showing.claim()
    answer.close()
    assert api.service.records.get(request.id).cancel
