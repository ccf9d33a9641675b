"""OpenAI's calls refuse what the native one refuses, in the one shape of all errors."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from werkzeug.test import TestResponse

from tests.integration.api_world import (
    Door,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)
from tests.integration.image_inputs import EDITING, RED, VIDEO
from tests.pictures import data_url, picture

ROUTES = ("generations", "edits", "chat", "native")


@pytest.fixture
def editing(door: Door) -> PlayedReplica:
    # Nothing is held: what should be refused and is not answers 503 at once.
    door.service.held_calls.close()
    return door.replica().load(EDITING)


def call(door: Door, route: str, **fields: Any) -> TestResponse:
    """Send the fields by one of the calls, with what it needs besides them."""
    match route:
        case "generations":
            body = {"prompt": "a red circle", **fields}
            return door.client.post("/v1/images/generations", json=body)
        case "chat":
            body = {"messages": [{"role": "user", "content": "a red circle"}], **fields}
            return door.client.post("/v1/chat/completions", json=body)
        case "edits":
            form = {
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in fields.items()
            }
            file = (io.BytesIO(RED), "red.png")
            return door.client.post(
                "/v1/images/edits",
                data={"prompt": "a red circle", "image": file, **form},
                content_type="multipart/form-data",
            )
    return door.submit(**fields)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_inference_steps", 0),
        ("num_inference_steps", -1),
        ("num_inference_steps", 10_000),
        ("num_inference_steps", "a"),
        ("guidance_scale", -1),
        ("seed", -1),
        ("width", 2**20),
        ("width", 63),
        ("size", "65536x65536"),
        ("size", "large"),
        ("model", "another"),
        ("sed", 1),
        ("scheduler", "NoScheduler"),
        ("output_format", "gif"),
    ],
)
def test_every_call_has_the_same_limits(
    door: Door, editing: PlayedReplica, route: str, name: str, value: Any
) -> None:
    wrong = wrong_fields(call(door, route, **{name: value}))
    assert set(wrong) == {"width" if name == "size" and value != "large" else name}


@pytest.mark.parametrize("route", ROUTES[:3])
@pytest.mark.parametrize("value", [0, 11, "a"])
def test_n_is_checked_by_its_own_name(
    door: Door, editing: PlayedReplica, route: str, value: Any
) -> None:
    assert set(wrong_fields(call(door, route, n=value))) == {"n"}


@pytest.mark.parametrize("route", ROUTES[:3])
def test_extra_body_is_checked_too(door: Door, editing: PlayedReplica, route: str) -> None:
    wrong = wrong_fields(call(door, route, extra_body={"num_inference_steps": 0, "sed": 1}))
    assert set(wrong) == {"num_inference_steps", "sed"}
    assert set(wrong_fields(call(door, route, extra_body=[1]))) == {"extra_body"}


@pytest.mark.parametrize("route", ROUTES[:3])
def test_a_field_in_two_places_is_malformed(door: Door, editing: PlayedReplica, route: str) -> None:
    for fields in (
        {"seed": 1, "extra_body": {"seed": 1}},
        {"n": 1, "num_outputs_per_prompt": 1},
        {"n": 1, "extra_body": {"num_outputs_per_prompt": 1}},
    ):
        answer = call(door, route, **fields)
        assert answer.status_code == 400, answer.json
        assert "more than once" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("response_format", "file"), ("background", "transparent"), ("output_compression", 101)],
)
def test_wrong_image_fields_are_named(
    door: Door, editing: PlayedReplica, name: str, value: Any
) -> None:
    assert set(wrong_fields(call(door, "generations", **{name: value}))) == {name}


def test_an_edit_needs_a_picture_and_a_prompt(door: Door, editing: PlayedReplica) -> None:
    answer = door.client.post(
        "/v1/images/edits", data={"size": "auto"}, content_type="multipart/form-data"
    )
    assert set(wrong_fields(answer)) == {"image", "prompt"}


def test_the_mask_is_checked_by_its_own_name(door: Door, editing: PlayedReplica) -> None:
    answer = door.client.post(
        "/v1/images/edits",
        data={
            "prompt": "a",
            "image": (io.BytesIO(RED), "red.png"),
            "mask": (io.BytesIO(picture(8, 8)), "mask.png"),
        },
        content_type="multipart/form-data",
    )
    assert set(wrong_fields(answer)) == {"mask"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hello", "messages"),
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": 7}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0]"),
        ([{"role": "user", "content": ""}], "messages"),
        ([{"role": "system", "content": "paint"}], "messages"),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
                    ],
                }
            ],
            "messages[0]",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        "a cat",
                        {"type": "image_url", "image_url": {"url": data_url(b"no picture")}},
                    ],
                }
            ],
            "messages",
        ),
    ],
)
def test_wrong_messages_are_named(
    door: Door, editing: PlayedReplica, messages: Any, param: str
) -> None:
    answer = door.client.post("/v1/chat/completions", json={"messages": messages})
    assert set(wrong_fields(answer)) == {param}


def test_a_chat_has_messages_and_no_prompt(door: Door, editing: PlayedReplica) -> None:
    answer = door.client.post("/v1/chat/completions", json={"prompt": "a cat"})
    assert {"messages", "prompt"} <= set(wrong_fields(answer)) | {"prompt"}


def test_a_chat_is_no_stream(door: Door, editing: PlayedReplica) -> None:
    assert set(wrong_fields(call(door, "chat", stream=True))) == {"stream"}
    # Nothing is wrong with it: the closed door lets the call go.
    assert call(door, "chat", stream=False).status_code == 503


@pytest.mark.parametrize("route", ROUTES[:2])
def test_streams_of_pictures_are_checked(door: Door, editing: PlayedReplica, route: str) -> None:
    for right in ({"stream": True}, {"stream": False, "partial_images": 0}):
        assert call(door, route, **right).status_code == 503
    for name, wrong in (
        ("stream", {"stream": "yes"}),
        ("partial_images", {"stream": True, "partial_images": 4}),
        ("partial_images", {"stream": True, "partial_images": -1}),
        ("partial_images", {"stream": True, "partial_images": "two"}),
        ("partial_images", {"partial_images": 2}),
        ("preview", {"stream": True, "partial_images": 2, "preview": False}),
        ("response_format", {"stream": True, "response_format": "url"}),
    ):
        assert set(wrong_fields(call(door, route, **wrong))) == {name}


def test_a_model_that_makes_videos_makes_no_pictures(door: Door) -> None:
    door.service.held_calls.close()
    door.replica().load(VIDEO)
    wrong = wrong_fields(call(door, "generations"))
    assert wrong == {
        "model": "'tiny' makes no pictures; its tasks are text-to-video, image-to-video"
    }


def test_nothing_that_is_refused_is_queued(door: Door, editing: PlayedReplica) -> None:
    for route in ROUTES:
        call(door, route, num_inference_steps=0)
    assert body_of(door.get("/v1/requests"))["data"] == []
