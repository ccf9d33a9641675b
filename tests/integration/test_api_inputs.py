"""Input images of a request: what they make of its task and its size, and their bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.parameters import Abilities
from configs.settings import Settings
from tests.integration.api_world import (
    MODEL,
    Api,
    PlayedReplica,
    wrong_fields,
)
from tests.integration.conftest import ApiOpener
from tests.integration.image_inputs import EDITING, MASK, RED, VIDEO
from tests.pictures import data_url, picture


def test_the_strength_of_the_stage_file_is_for_all_tasks_with_an_image(
    api_settings: Settings, open_api: ApiOpener, tmp_path: Path
) -> None:
    text = api_settings.stage_configs_path.read_text()
    params = "    default_sampling_params:\n"
    path = tmp_path / "stages.yaml"
    path.write_text(text.replace(params, f"{params}      strength: 0.6\n"))
    api = open_api(replace(api_settings, stage_configs_path=path))
    api.replica().load(replace(EDITING, default_strength=0.6))
    images: list[dict[str, str]] = [
        {"image": data_url(RED)},
        {"image": data_url(RED), "mask_image": data_url(MASK)},
    ]
    for given in images:
        assert api.submitted(**given)["parameters"]["strength"] == 0.6
        assert api.submitted(**given, strength=0.9)["parameters"]["strength"] == 0.9
    assert api.submitted()["parameters"]["strength"] is None


def test_an_image_makes_the_request_image_to_image(api: Api, editing: PlayedReplica) -> None:
    request = api.submitted(image=data_url(RED))
    parameters = request["parameters"]
    assert parameters["task"] == request["task"] == "image-to-image"
    assert (parameters["width"], parameters["height"]) == (80, 56)
    assert parameters["image"] == [f"/v1/requests/{request['id']}/inputs/0"]
    assert parameters["mask_image"] is None
    answer = api.get(parameters["image"][0])
    assert (answer.status_code, answer.data, answer.mimetype) == (200, RED, "image/png")
    assert api.get(parameters["image"][0], If_None_Match=answer.headers["ETag"]).status_code == 304
    assert api.get(f"/v1/requests/{request['id']}/inputs/1").status_code == 404


def test_a_mask_makes_it_inpaint(api: Api, editing: PlayedReplica) -> None:
    request = api.submitted(image=[data_url(RED)], mask_image=data_url(MASK))
    assert request["task"] == "inpaint"
    urls = [f"/v1/requests/{request['id']}/inputs/{index}" for index in (0, 1)]
    assert request["parameters"]["image"] == urls[:1]
    assert request["parameters"]["mask_image"] == urls[1]
    assert api.get(urls[1]).data == MASK
    claimed = editing.claim().parameters
    read = api.service.outputs.read
    assert [read(name) for name in claimed.image] == [RED]
    assert read(claimed.mask_image or "") == MASK


def test_no_image_is_text_to_image_and_a_named_task_stands(
    api: Api, editing: PlayedReplica
) -> None:
    assert api.submitted()["task"] == "text-to-image"
    assert set(wrong_fields(api.submit(task="image-to-image"))) == {"image"}
    assert set(wrong_fields(api.submit(task="inpaint"))) == {"image", "mask_image"}
    assert set(wrong_fields(api.submit(task="text-to-image", image=data_url(RED)))) == {"image"}
    assert set(wrong_fields(api.submit(mask_image=data_url(RED)))) == {"image"}


@pytest.mark.parametrize(
    "image",
    [
        "https://example.org/cat.png",
        "file:///etc/passwd",
        7,
        [],
        [data_url(b"no picture")],
        data_url(b""),
        "data:image/png;base64,%%%",
    ],
)
def test_what_is_no_picture_is_refused(
    api: Api, editing: PlayedReplica, api_settings: Settings, image: Any
) -> None:
    assert set(wrong_fields(api.submit(image=image, seed="x"))) == {"image", "seed"}
    assert not Path(api_settings.outputs_url.removeprefix("file://")).exists()


BROKEN, UNREADABLE = "data:image/png;base64,%%%", data_url(b"no picture")


@pytest.mark.parametrize("wrong", [BROKEN, UNREADABLE])
@pytest.mark.parametrize(
    ("call", "fields", "param"),
    [
        ("/v1/requests", {"image": "{}", "strength": 0.5}, "image"),
        ("/v1/requests", {"image": "{}", "mask_image": data_url(MASK)}, "image"),
        ("/v1/requests", {"image": "{}", "task": "inpaint"}, "image"),
        ("/v1/requests", {"image": [data_url(RED), "{}"]}, "image[1]"),
        ("/v1/requests", {"image": data_url(RED), "mask_image": "{}", "strength": 1}, "mask_image"),
        ("/v1/images/edits", {"image": "{}", "strength": 0.5}, "image"),
        ("/v1/images/edits", {"image": data_url(RED), "mask": "{}"}, "mask"),
        ("/v1/images/generations", {"image": "{}", "strength": 0.5}, "image"),
    ],
)
@pytest.mark.parametrize("makes", [EDITING, replace(EDITING, tasks=("text-to-image", "inpaint"))])
def test_a_broken_picture_is_one_error(
    api: Api, call: str, fields: dict[str, Any], param: str, wrong: str, makes: Abilities
) -> None:
    api.replica().load(makes)
    body = json.loads(json.dumps({"prompt": "a", **fields}).replace("{}", wrong))
    assert list(wrong_fields(api.client.post(call, json=body))) == [param]


def test_counts_and_sizes_are_bounded(
    api_settings: Settings, open_api: ApiOpener, editing: PlayedReplica
) -> None:
    api = open_api(replace(api_settings, max_input_pixels=48 * 32))
    too_many = wrong_fields(api.submit(image=[data_url(RED)] * 3))
    assert "3 pictures; use 2 at most" in too_many["image"]
    # They are counted before they are decoded, and one fault is one error.
    broken = wrong_fields(
        api.submit(image=[data_url(b"no picture")] * 3, mask_image=data_url(MASK))
    )
    assert broken == {"image": "has 3 pictures; use 1 at most for inpaint"}
    larger = data_url(picture(49, 32))
    assert set(wrong_fields(api.submit(image=[data_url(RED), larger]))) == {"image[1]"}
    both = api.submit(image=[data_url(RED)] * 2, mask_image=data_url(MASK))
    assert "use 1 at most for inpaint" in wrong_fields(both)["image"]
    other = wrong_fields(api.submit(image=data_url(RED), mask_image=data_url(picture(32, 32))))
    assert other["mask_image"] == "is 32 x 32 and the image 48 x 32; make them equal"


def test_a_model_without_image_tasks_says_so(api: Api, replica: PlayedReplica) -> None:
    wrong = wrong_fields(api.submit(image=data_url(RED), mask_image=data_url(MASK)))
    assert set(wrong) == {"image", "mask_image"}
    assert (
        wrong["image"] == "is not supported by text-to-image of 'tiny'; its tasks are text-to-image"
    )


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ((48, 32), (80, 56)),
        ((3, 3), (64, 64)),
        ((3000, 2000), (80, 56)),
        ((1000, 2000), (48, 88)),
        ((4000, 2), (512, 8)),
    ],
)
@pytest.mark.parametrize("task", ["image-to-image", "inpaint", "image-to-video"])
def test_without_a_size_the_shape_is_that_of_the_photo_and_the_pixels_are_the_models(
    api: Api, source: tuple[int, int], size: tuple[int, int], task: str
) -> None:
    makes = VIDEO if task == "image-to-video" else EDITING
    api.replica().load(replace(makes, max_pixels=128 * 64, default_width=64, default_height=64))
    photo = data_url(picture(*source))
    given = {"image": photo, **({"mask_image": photo} if task == "inpaint" else {})}
    parameters = api.submitted(**given)["parameters"]
    assert parameters["task"] == task
    assert (parameters["width"], parameters["height"]) == size
    asked = api.submitted(**given, size="64x32")["parameters"]
    assert (asked["width"], asked["height"]) == (64, 32)


def test_the_pixels_of_a_photo_stay_within_the_limits(api: Api) -> None:
    api.replica().load(replace(EDITING, max_pixels=128 * 64, default_width=1024))
    parameters = api.submitted(image=data_url(picture(2000, 1000)))["parameters"]
    assert (parameters["width"], parameters["height"]) == (128, 64)


def test_a_model_that_only_edits_is_not_asked_for_text(api: Api) -> None:
    api.replica().load(replace(EDITING, tasks=("image-to-image",), max_images=1))
    assert set(wrong_fields(api.submit())) == {"image"}
    assert api.submitted(image=data_url(RED), model=MODEL)["task"] == "image-to-image"


def test_json_that_names_bytes_is_still_json(api: Api, editing: PlayedReplica) -> None:
    body = json.dumps({"prompt": "a", "image": {"url": data_url(RED)}})
    answer = api.client.post("/v1/requests", data=body, content_type="application/json")
    assert set(wrong_fields(answer)) == {"image"}
