"""OpenAI's calls refuse what the native one refuses, in the one shape of all errors."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from werkzeug.test import TestResponse

from tests.integration.api_world import (
    Api,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)
from tests.integration.image_inputs import EDITING, RED, VIDEO
from tests.pictures import data_url, picture

ROUTES = ("generations", "edits", "chat", "native")


@pytest.fixture
def editing(api: Api) -> PlayedReplica:
    # Nothing is held: what should be refused and is not answers 503 at once.
    api.service.held_calls.close()
    return api.replica().load(EDITING)


def call(api: Api, route: str, **fields: Any) -> TestResponse:
    """Send the fields by one of the calls, with what it needs besides them."""
    match route:
        case "generations":
            body = {"prompt": "a red circle", **fields}
            return api.client.post("/v1/images/generations", json=body)
        case "chat":
            body = {"messages": [{"role": "user", "content": "a red circle"}], **fields}
            return api.client.post("/v1/chat/completions", json=body)
        case "edits":
            form = {
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in fields.items()
            }
            file = (io.BytesIO(RED), "red.png")
            return api.client.post(
                "/v1/images/edits",
                data={"prompt": "a red circle", "image": file, **form},
                content_type="multipart/form-data",
            )
    return api.submit(**fields)


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
        ("width", 0),  # 63 is rounded here and refused natively: test_openai_tolerance
        ("size", "65536x65536"),
        ("size", "large"),
        ("model", "another"),
        ("sed", 1),
        ("scheduler", "NoScheduler"),
        ("output_format", "gif"),
    ],
)
def test_every_call_has_the_same_limits(
    api: Api, editing: PlayedReplica, route: str, name: str, value: Any
) -> None:
    wrong = wrong_fields(call(api, route, **{name: value}))
    assert set(wrong) == {"width" if name == "size" and value != "large" else name}


@pytest.mark.parametrize("route", ROUTES[:3])
@pytest.mark.parametrize("value", [0, 11, "a"])
def test_n_is_checked_by_its_own_name(
    api: Api, editing: PlayedReplica, route: str, value: Any
) -> None:
    assert set(wrong_fields(call(api, route, n=value))) == {"n"}


@pytest.mark.parametrize("route", ROUTES[:3])
def test_extra_body_is_checked_too(api: Api, editing: PlayedReplica, route: str) -> None:
    wrong = wrong_fields(call(api, route, extra_body={"num_inference_steps": 0, "sed": 1}))
    assert set(wrong) == {"num_inference_steps", "sed"}
    assert set(wrong_fields(call(api, route, extra_body=[1]))) == {"extra_body"}


@pytest.mark.parametrize("route", ROUTES[:3])
def test_a_field_in_two_places_is_malformed(api: Api, editing: PlayedReplica, route: str) -> None:
    for fields in (
        {"seed": 1, "extra_body": {"seed": 1}},
        {"n": 1, "num_outputs_per_prompt": 1},
        {"n": 1, "extra_body": {"num_outputs_per_prompt": 1}},
    ):
        answer = call(api, route, **fields)
        assert answer.status_code == 400, answer.json
        assert "more than once" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("response_format", "file"), ("background", "transparent"), ("output_compression", 101)],
)
def test_wrong_image_fields_are_named(
    api: Api, editing: PlayedReplica, name: str, value: Any
) -> None:
    assert set(wrong_fields(call(api, "generations", **{name: value}))) == {name}


def test_an_edit_needs_a_picture_and_a_prompt(api: Api, editing: PlayedReplica) -> None:
    answer = api.client.post(
        "/v1/images/edits", data={"size": "auto"}, content_type="multipart/form-data"
    )
    assert set(wrong_fields(answer)) == {"image", "prompt"}


def test_the_mask_is_checked_by_its_own_name(api: Api, editing: PlayedReplica) -> None:
    answer = api.client.post(
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
    api: Api, editing: PlayedReplica, messages: Any, param: str
) -> None:
    answer = api.client.post("/v1/chat/completions", json={"messages": messages})
    assert set(wrong_fields(answer)) == {param}


def test_a_chat_has_messages_and_no_prompt(api: Api, editing: PlayedReplica) -> None:
    answer = api.client.post("/v1/chat/completions", json={"prompt": "a cat"})
    assert {"messages", "prompt"} <= set(wrong_fields(answer)) | {"prompt"}


def test_a_chat_streams_or_not(api: Api, editing: PlayedReplica) -> None:
    # Nothing is wrong with it: the closed API lets the call go.
    for value in (True, False):
        assert call(api, "chat", stream=value).status_code == 503
    assert set(wrong_fields(call(api, "chat", stream="yes"))) == {"stream"}


@pytest.mark.parametrize("route", ROUTES[:2])
def test_streams_of_pictures_are_checked(api: Api, editing: PlayedReplica, route: str) -> None:
    for right in ({"stream": True}, {"stream": False, "partial_images": 0}):
        assert call(api, route, **right).status_code == 503
    for name, wrong in (
        ("stream", {"stream": "yes"}),
        ("partial_images", {"stream": True, "partial_images": 4}),
        ("partial_images", {"stream": True, "partial_images": -1}),
        ("partial_images", {"stream": True, "partial_images": "two"}),
        ("partial_images", {"partial_images": 2}),
        ("preview", {"stream": True, "partial_images": 2, "preview": False}),
        ("response_format", {"stream": True, "response_format": "url"}),
    ):
        assert set(wrong_fields(call(api, route, **wrong))) == {name}


def test_a_model_that_makes_videos_makes_no_pictures(api: Api) -> None:
    api.service.held_calls.close()
    api.replica().load(VIDEO)
    wrong = wrong_fields(call(api, "generations"))
    assert wrong == {
        "model": "'tiny' makes no pictures; its tasks are text-to-video, image-to-video"
    }


def test_nothing_that_is_refused_is_queued(api: Api, editing: PlayedReplica) -> None:
    for route in ROUTES:
        call(api, route, num_inference_steps=0)
    assert body_of(api.get("/v1/requests"))["data"] == []
