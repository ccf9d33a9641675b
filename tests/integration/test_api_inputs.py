"""Image inputs of requests: in JSON and in forms, checked, stored, shown, changed and removed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import TestResponse, encode_multipart

from configs.settings import Settings
from tests.integration.api_world import (
    ABILITIES,
    MODEL,
    Door,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)
from tests.integration.conftest import OpenDoor
from tests.pictures import data_url, picture

EDITING = replace(
    ABILITIES, tasks=("text-to-image", "image-to-image", "inpaint"), max_images=2, strength=True
)
RED, BLUE = picture(48, 32), picture(48, 32, color="blue")
MASK = picture(48, 32, color="white")


@pytest.fixture
def editing(door: Door) -> PlayedReplica:
    """A ready replica of a model that takes images."""
    return door.replica().load(EDITING)


def files(settings: Settings, request_id: str) -> list[str]:
    folder = Path(settings.outputs_url.removeprefix("file://")) / request_id
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def send_form(door: Door, **fields: Any) -> TestResponse:
    data = {"prompt": "a red circle", **fields}
    return door.client.post("/v1/requests", data=data, content_type="multipart/form-data")


def file(data: bytes, name: str = "any.bin") -> tuple[io.BytesIO, str]:
    return io.BytesIO(data), name


def test_the_strength_of_the_stage_file_is_for_all_tasks_with_an_image(
    api_settings: Settings, open_door: OpenDoor, tmp_path: Path
) -> None:
    text = api_settings.stage_configs_path.read_text()
    params = "    default_sampling_params:\n"
    path = tmp_path / "stages.yaml"
    path.write_text(text.replace(params, f"{params}      strength: 0.6\n"))
    door = open_door(replace(api_settings, stage_configs_path=path))
    door.replica().load(replace(EDITING, default_strength=0.6))
    images: list[dict[str, str]] = [
        {"image": data_url(RED)},
        {"image": data_url(RED), "mask_image": data_url(MASK)},
    ]
    for given in images:
        assert door.submitted(**given)["parameters"]["strength"] == 0.6
        assert door.submitted(**given, strength=0.9)["parameters"]["strength"] == 0.9
    assert door.submitted()["parameters"]["strength"] is None


def test_an_image_makes_the_request_image_to_image(door: Door, editing: PlayedReplica) -> None:
    request = door.submitted(image=data_url(RED))
    parameters = request["parameters"]
    assert parameters["task"] == request["task"] == "image-to-image"
    assert (parameters["width"], parameters["height"]) == (48, 32)
    assert parameters["image"] == [f"/v1/requests/{request['id']}/inputs/0"]
    assert parameters["mask_image"] is None
    answer = door.get(parameters["image"][0])
    assert (answer.status_code, answer.data, answer.mimetype) == (200, RED, "image/png")
    assert door.get(parameters["image"][0], If_None_Match=answer.headers["ETag"]).status_code == 304
    assert door.get(f"/v1/requests/{request['id']}/inputs/1").status_code == 404


def test_a_mask_makes_it_inpaint(door: Door, editing: PlayedReplica) -> None:
    request = door.submitted(image=[data_url(RED)], mask_image=data_url(MASK))
    assert request["task"] == "inpaint"
    urls = [f"/v1/requests/{request['id']}/inputs/{index}" for index in (0, 1)]
    assert request["parameters"]["image"] == urls[:1]
    assert request["parameters"]["mask_image"] == urls[1]
    assert door.get(urls[1]).data == MASK
    claimed = editing.claim().parameters
    read = door.service.router.outputs.read
    assert [read(name) for name in claimed.image] == [RED]
    assert read(claimed.mask_image or "") == MASK


def test_no_image_is_text_to_image_and_a_named_task_stands(
    door: Door, editing: PlayedReplica
) -> None:
    assert door.submitted()["task"] == "text-to-image"
    assert set(wrong_fields(door.submit(task="image-to-image"))) == {"image"}
    assert set(wrong_fields(door.submit(task="inpaint"))) == {"image", "mask_image"}
    assert set(wrong_fields(door.submit(task="text-to-image", image=data_url(RED)))) == {"image"}
    assert set(wrong_fields(door.submit(mask_image=data_url(RED)))) == {"image"}


def test_a_form_says_what_json_says(door: Door, editing: PlayedReplica) -> None:
    answer = send_form(
        door,
        image=file(RED),
        mask_image=file(MASK),
        num_inference_steps="7",
        guidance_scale="2.5",
        deterministic="true",
        seed="3",
        output_format="webp",
        metadata='{"who": "me"}',
    )
    assert answer.status_code == 202, answer.json
    request = body_of(answer)
    assert request["task"] == "inpaint"
    wanted = {
        "num_inference_steps": 7,
        "guidance_scale": 2.5,
        "deterministic": True,
        "seed": 3,
        "output_format": "webp",
    }
    assert {name: request["parameters"][name] for name in wanted} == wanted
    assert request["metadata"] == {"who": "me"}


def test_a_form_takes_several_files_and_bracketed_names(door: Door, editing: PlayedReplica) -> None:
    for fields in (
        {"image": [file(RED), file(BLUE)]},
        {"image[]": [file(RED), file(BLUE)]},
    ):
        answer = send_form(door, **fields, **{"metadata[n]": "7"})
        assert answer.status_code == 202, answer.json
        request = body_of(answer)
        assert request["metadata"] == {"n": "7"}
        assert [door.get(url).data for url in request["parameters"]["image"]] == [RED, BLUE]


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", "a"), ("num_inference_steps", "1.5"), ("guidance_scale", "NaN"), ("sed", "1")],
)
def test_wrong_form_fields_are_refused_as_in_json(
    door: Door, editing: PlayedReplica, name: str, value: str
) -> None:
    assert set(wrong_fields(send_form(door, **{name: value}))) == {name}


def test_a_name_that_stands_twice_is_malformed(door: Door, editing: PlayedReplica) -> None:
    answer = send_form(door, seed=["1", "2"])
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "seed"
    assert send_form(door, **{"seed[a][b]": "1"}).status_code == 400


def test_a_part_without_a_name_is_malformed(door: Door, editing: PlayedReplica) -> None:
    for header in ("form-data", 'form-data; filename="a.png"'):
        body = f"--x\r\nContent-Disposition: {header}\r\n\r\na\r\n--x--\r\n"
        answer = door.client.post(
            "/v1/requests", data=body, content_type="multipart/form-data; boundary=x"
        )
        assert answer.status_code == 400
        assert "no name of a form field" in error_of(answer)["message"]


def test_an_adapter_in_a_form_is_json(door: Door, editing: PlayedReplica) -> None:
    answer = send_form(door, image=file(BLUE), lora='{"name": "ink", "scale": 2}')
    assert body_of(answer)["parameters"]["lora"] == [{"name": "ink", "scale": 2.0}]


def test_a_large_data_url_fits_into_a_form(door: Door, editing: PlayedReplica) -> None:
    large = picture(64, 64, "jpeg") + b"\0" * 1_000_000
    boundary, body = encode_multipart({"prompt": "a", "image": data_url(large, "image/jpeg")})
    answer = door.client.post(
        "/v1/requests", data=body, content_type=f"multipart/form-data; boundary={boundary}"
    )
    assert answer.status_code == 202, answer.json


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
    door: Door, editing: PlayedReplica, api_settings: Settings, image: Any
) -> None:
    assert set(wrong_fields(door.submit(image=image, seed="x"))) == {"image", "seed"}
    assert not Path(api_settings.outputs_url.removeprefix("file://")).exists()


def test_counts_and_sizes_are_bounded(
    api_settings: Settings, open_door: OpenDoor, editing: PlayedReplica
) -> None:
    door = open_door(replace(api_settings, max_input_pixels=48 * 32))
    too_many = wrong_fields(door.submit(image=[data_url(RED)] * 3))
    assert "3 pictures; 2 is the most" in too_many["image"]
    larger = data_url(picture(49, 32))
    assert set(wrong_fields(door.submit(image=[data_url(RED), larger]))) == {"image[1]"}
    both = door.submit(image=[data_url(RED)] * 2, mask_image=data_url(MASK))
    assert "1 is the most for inpaint" in wrong_fields(both)["image"]
    other = wrong_fields(door.submit(image=data_url(RED), mask_image=data_url(picture(32, 32))))
    assert other["mask_image"] == "is 32 x 32 and the image 48 x 32; make them equal"


def test_a_model_without_image_tasks_says_so(door: Door, replica: PlayedReplica) -> None:
    wrong = wrong_fields(door.submit(image=data_url(RED), mask_image=data_url(MASK)))
    assert set(wrong) == {"image", "mask_image"}
    assert wrong["image"] == "text-to-image takes none; the tasks of 'tiny' are text-to-image"


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ((50, 33), (48, 32)),
        ((3, 3), (8, 8)),
        ((2000, 1000), (128, 64)),
        ((1000, 2000), (64, 128)),
        ((4000, 2), (1024, 8)),
    ],
)
def test_the_default_size_follows_the_image_into_the_limits(
    door: Door, source: tuple[int, int], size: tuple[int, int]
) -> None:
    door.replica().load(replace(EDITING, max_pixels=128 * 64))
    parameters = door.submitted(image=data_url(picture(*source)))["parameters"]
    assert (parameters["width"], parameters["height"]) == size
    given = door.submitted(image=data_url(picture(*source)), size="64x32")["parameters"]
    assert (given["width"], given["height"]) == (64, 32)


def test_a_video_takes_the_shape_of_the_image_and_the_usual_number_of_pixels(door: Door) -> None:
    film: dict[str, Any] = {
        "default_frames": 81,
        "frames_step": 4,
        "default_fps": 16.0,
        "strength": False,
    }
    door.replica().load(replace(EDITING, tasks=("image-to-video",), max_images=1, **film))
    parameters = door.submitted(image=data_url(picture(400, 100)))["parameters"]
    assert parameters["task"] == "image-to-video"
    assert (parameters["width"], parameters["height"]) == (128, 32)


def test_files_go_with_the_request(
    door: Door, editing: PlayedReplica, api_settings: Settings
) -> None:
    request_id = door.submitted(image=data_url(RED), mask_image=data_url(MASK))["id"]
    assert len(files(api_settings, request_id)) == 2
    assert door.delete(f"/v1/requests/{request_id}").status_code == 204
    assert files(api_settings, request_id) == []


def test_a_submit_that_is_refused_leaves_no_files(
    api_settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(replace(api_settings, max_waiting_per_replica=1))
    door.replica().load(EDITING)
    door.submitted()
    assert door.submit(image=data_url(RED)).status_code == 429
    folder = Path(api_settings.outputs_url.removeprefix("file://"))
    left = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    assert left == []


def test_an_idempotency_key_knows_the_pictures(
    door: Door, editing: PlayedReplica, api_settings: Settings
) -> None:
    key = {"Idempotency-Key": "one"}
    first = body_of(door.submit(key, image=data_url(RED)))
    again = door.submit(key, image=[data_url(RED, "image/webp")])
    assert again.status_code == 200
    assert body_of(again)["id"] == first["id"]
    assert door.submit(key, image=data_url(BLUE)).status_code == 409
    folder = Path(api_settings.outputs_url.removeprefix("file://"))
    assert [path.parent.name for path in folder.rglob("*") if path.is_file()] == [first["id"]]


def test_the_images_of_a_waiting_request_can_be_changed(
    door: Door, editing: PlayedReplica, api_settings: Settings
) -> None:
    request_id = door.submitted(size="64x64")["id"]
    edited = body_of(door.patch(request_id, image=data_url(RED)))
    assert edited["task"] == "image-to-image"
    assert (edited["parameters"]["width"], edited["parameters"]["height"]) == (64, 64)
    back = body_of(door.patch(request_id, width=None, height=None))
    assert (back["parameters"]["width"], back["parameters"]["height"]) == (48, 32)
    form = {"image": file(BLUE), "mask_image": file(MASK), "seed": "5"}
    other = door.client.patch(
        f"/v1/requests/{request_id}", data=form, content_type="multipart/form-data"
    )
    assert other.status_code == 200, other.json
    assert body_of(other)["task"] == "inpaint"
    assert body_of(other)["parameters"]["seed"] == 5
    assert door.get(f"/v1/requests/{request_id}/inputs/0").data == BLUE
    assert len(files(api_settings, request_id)) == 2
    none = body_of(door.patch(request_id, image=None, mask_image=None))
    assert (none["task"], none["parameters"]["image"]) == ("text-to-image", [])
    assert files(api_settings, request_id) == []


def test_an_edit_that_is_refused_changes_no_file(
    door: Door, editing: PlayedReplica, api_settings: Settings
) -> None:
    request_id = door.submitted(image=data_url(RED))["id"]
    before = files(api_settings, request_id)
    assert door.patch(request_id, image=[data_url(BLUE)] * 3).status_code == 422
    claimed = editing.claim()
    assert door.patch(request_id, image=data_url(BLUE)).status_code == 409
    assert files(api_settings, request_id) == before
    editing.stop(claimed)
    assert door.patch(request_id, image=data_url(BLUE)).status_code == 409
    assert files(api_settings, request_id) == before


def test_inputs_that_can_not_be_stored_refuse_the_submit(
    api_settings: Settings, open_door: OpenDoor, editing: PlayedReplica, tmp_path: Path
) -> None:
    wall = tmp_path / "wall"
    wall.write_text("a file where the folder should be")
    door = open_door(replace(api_settings, outputs_url=f"file://{wall}"))
    answer = door.submit(image=data_url(RED))
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "store_unavailable"
    assert "Retry-After" in answer.headers
    assert body_of(door.get("/v1/requests"))["data"] == []


def test_a_model_that_only_edits_is_not_asked_for_text(door: Door) -> None:
    door.replica().load(replace(EDITING, tasks=("image-to-image",), max_images=1))
    assert set(wrong_fields(door.submit())) == {"image"}
    assert door.submitted(image=data_url(RED), model=MODEL)["task"] == "image-to-image"


def test_json_that_names_bytes_is_still_json(door: Door, editing: PlayedReplica) -> None:
    body = json.dumps({"prompt": "a", "image": {"url": data_url(RED)}})
    answer = door.client.post("/v1/requests", data=body, content_type="application/json")
    assert set(wrong_fields(answer)) == {"image"}


def test_a_part_of_a_form_without_a_name_is_malformed(door: Door, replica: PlayedReplica) -> None:
    body = b"--b\r\nContent-Disposition: form-data\r\n\r\na\r\n--b--\r\n"
    answer = door.client.post(
        "/v1/requests", data=body, content_type="multipart/form-data; boundary=b"
    )
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "malformed_request"
