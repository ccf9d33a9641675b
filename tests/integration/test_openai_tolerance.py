"""OpenAI's calls accept what cannot do harm and say so; native calls refuse it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from routing.request import Request
from tests.integration.api_world import (
    ABILITIES,
    Api,
    PlayedReplica,
    body_of,
    wrong_fields,
)
from tests.integration.image_inputs import EDITING, RED, VIDEO
from tests.pictures import data_url

FLOW = replace(
    VIDEO, scheduler_settings={"flow_shift": {"value": 5.0, "saved": 3.0, "source": "stage"}}
)


def accepted(api: Api, replica: PlayedReplica, **fields: Any) -> tuple[Request, list[str]]:
    """Send what vLLM-Omni's clients of videos send, as a form; return what became of it."""
    form = {
        name: each if isinstance(each, str) else json.dumps(each) for name, each in fields.items()
    }
    answer = api.client.post(
        "/v1/videos", data={"prompt": "a", **form}, content_type="multipart/form-data"
    )
    assert answer.status_code == 200, answer.get_data(as_text=True)
    request = replica.claim()
    warnings = body_of(answer)["warnings"]
    replica.succeed(request)
    # What was said at submit is still said when the video is there.
    assert body_of(api.get(f"/v1/videos/{request.id}"))["warnings"] == warnings
    return request, warnings


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({"num_frames": 80}, {"num_frames": 81}),
        ({"num_frames": 79}, {"num_frames": 77}),  # half of a step: as diffusers' Wan
        ({"num_frames": 2}, {"num_frames": 1}),
        ({"size": "854x480"}, {"width": 848, "height": 480}),
        ({"width": 850, "height": 490}, {"width": 848, "height": 496}),
        ({"width": 1, "height": 64}, {"width": 16, "height": 64}),
        ({"num_frames": 81, "size": "64x48"}, {"num_frames": 81, "width": 64, "height": 48}),
    ],
)
def test_what_must_be_rounded_is_and_both_values_are_said(
    api: Api, asked: dict[str, Any], made: dict[str, int]
) -> None:
    replica = api.replica().load(replace(VIDEO, size_multiple=16))
    request, warnings = accepted(api, replica, **asked)
    assert {name: getattr(request.parameters, name) for name in made} == made
    sides = asked.get("size", "x").split("x")
    told = {"width": sides[0], "height": sides[-1], **{k: str(v) for k, v in asked.items()}}
    changed = {name for name, value in made.items() if str(value) != told[name]}
    assert {line.split()[0] for line in warnings} == changed
    for line in warnings:
        name = line.split()[0]
        assert told[name] in line
        assert str(made[name]) in line


@pytest.mark.parametrize(
    "fields", [{"num_frames": 80}, {"width": 63}, {"return_stage_metrics": True}]
)
def test_native_calls_stay_strict(api: Api, fields: dict[str, Any]) -> None:
    api.replica().load(VIDEO)
    assert set(wrong_fields(api.submit(**fields))) == set(fields)


@pytest.mark.parametrize("fields", [{"num_frames": 0}, {"num_frames": 120}, {"width": 99_999}])
def test_what_is_out_of_range_is_not_rounded(api: Api, fields: dict[str, Any]) -> None:
    api.replica().load(VIDEO)
    answer = api.client.post("/v1/videos", json={"prompt": "a", **fields})
    assert set(wrong_fields(answer)) == set(fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"return_stage_metrics": True}, ["return_stage_metrics"]),
        ({"flow_shift": "5.0"}, []),
        ({"flow_shift": "12.0"}, ["flow_shift"]),
        ({"boundary_ratio": "0.875"}, ["boundary_ratio"]),
        ({"extra_params": {}}, []),
        ({"extra_params": {"sample_solver": "unipc"}}, ["extra_params"]),
        ({"guidance_scale_2": "4.0"}, ["guidance_scale_2"]),
        ({"true_cfg_scale": 4.0}, ["true_cfg_scale"]),
        ({"true_cfg_scale": 1.0}, []),
        ({"strength": 0.5}, ["strength"]),
    ],
)
def test_known_fields_that_the_model_does_not_read_are_named(
    api: Api, fields: dict[str, Any], named: list[str]
) -> None:
    request, warnings = accepted(api, api.replica().load(FLOW), **fields)
    assert [line.split()[0] for line in warnings] == named
    assert request.parameters.true_cfg_scale is None


def test_an_edit_of_qwens_example_says_what_is_not_read(api: Api) -> None:
    """Both scales together, and the picture as a data URL in `url[]`, as the benchmark sends it."""
    replica = api.replica().load(
        replace(EDITING, guidance_scale=False, true_cfg_scale=True, default_guidance_scale=None)
    )
    api.service.held_calls.close()
    form = {
        "prompt": "a",
        "guidance_scale": "1.0",
        "true_cfg_scale": "4.0",
        "return_stage_metrics": "true",
    }
    for name in ("url", "url[]"):
        answer = api.client.post(
            "/v1/images/edits",
            data={**form, name: data_url(RED)},
            content_type="multipart/form-data",
        )
        assert answer.status_code == 503, answer.json  # nothing is wrong: the closed API lets it go
    assert replica.name == "replica0"


def test_a_picture_without_a_place_is_still_refused(api: Api) -> None:
    api.replica().load(ABILITIES)
    answer = api.client.post("/v1/images/generations", json={"prompt": "a", "image": data_url(RED)})
    assert "image" in wrong_fields(answer)


@pytest.mark.parametrize("steps", [1, 2, 3, 49])
def test_a_default_strength_leaves_one_step(api: Api, steps: int) -> None:
    replica = api.replica().load(replace(EDITING, default_strength=0.02))
    answer = api.submit(image=data_url(RED), num_inference_steps=steps)
    assert answer.status_code == 202, answer.json
    parameters = replica.claim().parameters
    assert parameters.strength is not None
    assert int(parameters.strength * steps) == 1
    assert [line.split()[0] for line in body_of(answer)["warnings"]] == ["strength"]
    refused = api.submit(image=data_url(RED), num_inference_steps=1, strength=0.02)
    assert set(wrong_fields(refused)) == {"strength"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"negative_prompt": "blurry", "guidance_scale": 1}, ["negative_prompt"]),
        ({"negative_prompt": "blurry", "guidance_scale": 1.5}, []),
        ({"negative_prompt": "blurry"}, []),
        ({"guidance_scale": 1}, []),
        ({"prompt": "word " * 78}, ["prompt"]),
        ({"prompt": "word " * 70}, []),
        ({"negative_prompt": "word " * 78}, ["negative_prompt"]),
    ],
)
def test_what_has_no_effect_is_said_at_submit(
    api: Api, replica: PlayedReplica, fields: dict[str, Any], named: list[str]
) -> None:
    warnings = api.submitted(**fields)["warnings"]
    assert [line.split()[0] for line in warnings] == named


def test_true_guidance_without_a_negative_prompt_is_said(api: Api) -> None:
    api.replica().load(replace(ABILITIES, true_cfg_scale=True, default_true_cfg_scale=1.0))
    for fields, named in (
        ({"true_cfg_scale": 4.0}, ["true_cfg_scale"]),
        ({"true_cfg_scale": 4.0, "negative_prompt": "blurry"}, []),
        ({"negative_prompt": "blurry"}, ["negative_prompt"]),
        ({}, []),
    ):
        warnings = api.submitted(**fields)["warnings"]
        assert [line.split()[0] for line in warnings] == named
