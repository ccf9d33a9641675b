"""Wrong fields of a submit: each is named, in its own words, and nothing is queued."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.api_world import (
    Api,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)

WRONG: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("prompt", "  \n"),
    ("prompt", "x" * 8193),
    ("prompt", "a\0b"),
    ("prompt", 5),
    ("prompt", ["a"]),
    ("negative_prompt", "x" * 8193),
    ("negative_prompt", {}),
    ("model", "huge"),
    ("model", 1),
    ("task", "text-to-video"),
    ("width", 63),
    ("width", 0),
    ("width", -64),
    ("width", 64.0),
    ("width", "64"),
    ("width", True),
    ("width", 8 * 10**6),
    ("width", 10**40),
    ("height", 4),
    ("height", [64]),
    ("size", "64"),
    ("size", "64x-64"),
    ("size", 64),
    ("num_inference_steps", 0),
    ("num_inference_steps", 1001),
    ("num_inference_steps", 20.5),
    ("num_inference_steps", False),
    ("guidance_scale", -1),
    ("guidance_scale", 100.5),
    ("guidance_scale", "3"),
    ("guidance_scale", True),
    ("guidance_scale", 10**400),
    ("true_cfg_scale", 3),
    ("num_outputs_per_prompt", 0),
    ("num_outputs_per_prompt", 11),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("seed", "7"),
    ("seed", 10**400),
    ("scheduler", "NoScheduler"),
    ("output_format", "gif"),
    ("output_format", "mp4"),
    ("output_compression", 50),
    ("deterministic", "yes"),
    ("deterministic", 1),
    ("priority", "urgent"),
    ("priority", 1),
    ("expires_in", 0),
    ("expires_in", -5),
    ("expires_in", 10**9),
    ("timeout", 0),
    ("timeout", "60"),
    ("metadata", "text"),
    ("metadata", {str(number): "x" for number in range(17)}),
    ("image", "data:image/png;base64,AAAA"),
    ("mask_image", "data:image/png;base64,AAAA"),
    ("strength", 0.5),
    ("lora", {"name": "gouache"}),
    ("lora", {"name": "../pixel"}),
    ("lora", "pixel"),
    ("lora", {"scale": 1}),
    ("lora", {"name": "pixel", "scale": "1"}),
    ("lora", {"name": "pixel", "scale": True}),
    ("lora", {"name": "pixel", "scale": 101}),
    ("lora", {"name": "pixel", "path": "/etc/passwd"}),
    ("lora", [{"name": "pixel"}, {"name": "pixel", "scale": 2}]),
    ("lora", [{"name": "pixel"}] * 9),
    ("num_frames", 16),
    ("fps", 8),
    ("preview", True),
    ("affinity_key", 5),
    ("affinity_key", ""),
    ("affinity_key", "x" * 65),
    ("webhook", {"url": "http://127.0.0.1/"}),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_field_is_named_and_nothing_is_queued(
    api: Api, replica: PlayedReplica, field: str, value: Any
) -> None:
    answer = api.submit(**{field: value})
    assert set(wrong_fields(answer)) == {field}
    error = error_of(answer)
    assert error["code"] == "invalid_parameter"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert body_of(api.get("/v1/requests"))["data"] == []


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"name": 5}, "metadata.name"),
        ({"name": "x" * 513}, "metadata.name"),
        ({"name": None}, "metadata.name"),
        ({"n" * 65: "x"}, "metadata." + "n" * 64),
        ({"": "x"}, "metadata."),
    ],
)
def test_a_wrong_metadata_entry_is_named(
    api: Api, replica: PlayedReplica, value: dict[str, Any], path: str
) -> None:
    assert list(wrong_fields(api.submit(metadata=value))) == [path]


def test_the_edges_of_what_is_right_are_accepted(api: Api, replica: PlayedReplica) -> None:
    for right in (
        {"seed": 2**63 - 1},
        {"seed": 2**63 - 2, "num_outputs_per_prompt": 2},
        {"seed": 0, "width": 8, "height": 8},
        {"prompt": "x" * 8192},
        {"guidance_scale": 0},
        {"num_inference_steps": 1000, "num_outputs_per_prompt": 10},
        {"output_format": "jpeg", "output_compression": 0},
        {"scheduler": "EulerDiscreteScheduler", "deterministic": True},
        {"metadata": {"n" * 64: "x" * 512}, "expires_in": 0.5, "timeout": 31_536_000},
        {"prompt": "ein roter Kreis, 赤い丸 🔴"},
        {"affinity_key": "🔴" * 64},
    ):
        request = api.submitted(**right)
        for name, value in right.items():
            assert {**request["parameters"], **request, "expires_in": 0.5}[name] == value
    assert set(wrong_fields(api.submit(seed=2**63 - 1, num_outputs_per_prompt=2))) == {"seed"}


def test_all_wrong_fields_are_named_at_once(api: Api, replica: PlayedReplica) -> None:
    answer = api.client.post(
        "/v1/requests",
        json={
            "width": 63,
            "num_inference_steps": "many",
            "seed": -1,
            "fps": 8,
            "lora": "pixel",
            "negativ_prompt": "",
        },
    )
    wrong = wrong_fields(answer)
    assert set(wrong) == {
        "prompt",
        "width",
        "num_inference_steps",
        "seed",
        "fps",
        "lora",
        "negativ_prompt",
    }
    assert wrong["prompt"] == "is missing"
    assert wrong["width"] == "63 is not a multiple of 8; use 56 or 64"
    assert wrong["num_inference_steps"] == "'many' is not a whole number"
    assert wrong["fps"] == "is not supported by text-to-image of 'tiny'; leave it out"
    assert "is not an adapter; write" in wrong["lora"]
    assert "did you mean negative_prompt?" in wrong["negativ_prompt"]
    assert error_of(answer)["param"] is None


def test_a_wrong_model_is_named_with_the_known_ones_and_the_other_faults(
    api: Api, replica: PlayedReplica
) -> None:
    wrong = wrong_fields(api.submit(model="huge", seed="x"))
    assert set(wrong) == {"model", "seed"}
    assert "use tiny" in wrong["model"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("steps", "num_inference_steps"),
        ("guidance", "guidance_scale"),
        ("widht", "width"),
        ("promt", "prompt"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_known_one(
    api: Api, replica: PlayedReplica, given: str, meant: str
) -> None:
    fields: dict[str, Any] = {given: 1}
    answer = api.submit(**fields)
    assert f"did you mean {meant}?" in wrong_fields(answer)[given]
    assert error_of(answer)["details"][0]["code"] == "unknown_key"


def test_a_number_too_large_for_a_float_is_a_wrong_field(api: Api, replica: PlayedReplica) -> None:
    body = '{"prompt": "a", "guidance_scale": 1e999}'
    answer = api.client.post("/v1/requests", data=body, content_type="application/json")
    assert set(wrong_fields(answer)) == {"guidance_scale"}


def test_twenty_wrong_submits_at_once_do_no_harm(api: Api, replica: PlayedReplica) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda number: api.submit(width=number), [65] * 20))
    assert [answer.status_code for answer in answers] == [422] * 20
    assert api.submit().status_code == 202
