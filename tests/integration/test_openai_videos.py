"""`/v1/videos` with a played replica: submit, poll, fetch, list, delete, and what is refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
from werkzeug.test import TestResponse

from tests.integration.api_world import (
    PIXELS,
    Door,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)
from tests.integration.image_inputs import VIDEO
from tests.integration.spec import Spec
from tests.pictures import data_url, picture


@pytest.fixture
def filming(door: Door) -> PlayedReplica:
    return door.replica().load(VIDEO)


def create(door: Door, **fields: Any) -> TestResponse:
    """As the clients send it: a form."""
    data = {"prompt": "a moving cat", **fields}
    return door.client.post("/v1/videos", data=data, content_type="multipart/form-data")


def created(door: Door, **fields: Any) -> dict[str, Any]:
    answer = create(door, **fields)
    assert answer.status_code == 200, answer.json
    return body_of(answer)


def test_a_video_from_submit_to_file(door: Door, filming: PlayedReplica) -> None:
    video = created(door, width="64", height="32", num_frames="13", fps="4", seed="3", user="me")
    assert (video["object"], video["status"], video["progress"]) == ("video", "queued", 0)
    assert (video["size"], video["seconds"], video["num_frames"]) == ("64x32", "3.25", 13)
    assert video["peak_memory_mb"] == 0.0
    assert video["stage_durations"] == {}
    assert video["warnings"] == ["user has no meaning here and was left aside"]
    path = f"/v1/videos/{video['id']}"
    claimed = filming.claim()
    assert (claimed.parameters.task, claimed.parameters.seed) == ("text-to-video", 3)
    door.service.router.claims.progress(claimed, 5, 20, 0.1)
    running = body_of(door.get(path))
    assert (running["status"], running["progress"]) == ("in_progress", 25)
    assert door.get(f"{path}/content").status_code == 404
    door.service.router.claims.progress(claimed, 20, 20, 0.1)
    assert body_of(door.get(path))["progress"] == 99

    filming.succeed(claimed)
    done = body_of(door.get(path))
    assert (done["status"], done["progress"]) == ("completed", 100)
    assert done["stage_durations"]["denoise"] == 0.5
    assert done["completed_at"] >= done["created_at"]
    assert done["expires_at"] > done["completed_at"]
    content = door.get(f"{path}/content")
    assert (content.status_code, content.data) == (200, PIXELS)
    assert door.get(f"{path}/content?index=1").status_code == 404
    assert set(wrong_fields(door.get(f"{path}/content?variant=thumbnail"))) == {"variant"}

    deleted = door.delete(path)
    assert body_of(deleted) == {"id": video["id"], "object": "video.deleted", "deleted": True}
    assert door.get(path).status_code == 404
    assert door.delete(path).status_code == 404


@pytest.mark.parametrize(
    ("fields", "frames"),
    [({}, 9), ({"seconds": "1"}, 9), ({"seconds": "4"}, 33), ({"seconds": "4", "fps": "4"}, 17)],
)
def test_seconds_become_frames_that_the_model_makes(
    door: Door, filming: PlayedReplica, fields: dict[str, str], frames: int
) -> None:
    assert created(door, **fields)["num_frames"] == frames


def test_a_form_without_files_may_be_urlencoded(door: Door, filming: PlayedReplica) -> None:
    data = {"prompt": "a", "num_inference_steps": "3", "num_frames": "5"}
    answer = door.client.post("/v1/videos", data=data)
    assert answer.request.mimetype == "application/x-www-form-urlencoded"
    assert answer.status_code == 200, answer.json
    assert filming.claim().parameters.num_inference_steps == 3


def test_json_is_taken_too(door: Door, filming: PlayedReplica) -> None:
    body = {"prompt": "a", "seconds": 1, "extra_body": {"num_inference_steps": 3}}
    answer = door.client.post("/v1/videos", json=body)
    assert answer.status_code == 200, answer.json
    assert filming.claim().parameters.num_inference_steps == 3


@pytest.mark.parametrize("how", ["file", "object", "url"])
def test_a_reference_picture_makes_it_image_to_video(
    door: Door, filming: PlayedReplica, how: str
) -> None:
    red = picture(128, 64)
    ways: dict[str, dict[str, Any]] = {
        "file": {"input_reference": (io.BytesIO(red), "red.png")},
        "object": {"input_reference[image_url]": data_url(red)},
        "url": {"input_reference": data_url(red)},
    }
    video = created(door, **ways[how])
    assert video["size"] == "88x48"
    claimed = filming.claim()
    assert claimed.parameters.task == "image-to-video"
    assert door.service.router.outputs.read(claimed.parameters.image[0]) == red


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", "0"),
        ("seconds", "1.5"),
        ("seconds", "9999"),
        ("num_frames", "10"),
        ("num_frames", "0"),
        ("fps", "0"),
        ("num_inference_steps", "0"),
        ("num_inference_steps", "10000"),
        ("size", "1280x721"),
        ("width", "63"),
        ("n", "11"),
        ("model", "sora-2"),
        ("input_reference", "https://example.org/cat.png"),
        ("aspect_ratio", "16:9"),
        ("output_format", "png"),
    ],
)
def test_wrong_fields_are_named(door: Door, filming: PlayedReplica, name: str, value: str) -> None:
    wrong = set(wrong_fields(create(door, **{name: value})))
    assert wrong == {"height" if name == "size" else name}


def test_a_field_in_two_places_is_malformed(door: Door, filming: PlayedReplica) -> None:
    assert create(door, seconds="1", num_frames="9").status_code == 400
    assert create(door, seed="1", extra_body='{"seed": 1}').status_code == 400


def test_a_model_of_pictures_makes_no_videos(door: Door, replica: PlayedReplica) -> None:
    assert set(wrong_fields(create(door))) == {"model"}
    request_id = door.submitted()["id"]
    for answer in (
        door.get(f"/v1/videos/{request_id}"),
        door.get(f"/v1/videos/{request_id}/content"),
        door.delete(f"/v1/videos/{request_id}"),
        door.get("/v1/videos/nobody"),
    ):
        assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
    assert door.get(f"/v1/requests/{request_id}").status_code == 200


def test_a_video_that_fails_says_why(door: Door, filming: PlayedReplica) -> None:
    video = created(door)
    filming.fail(filming.claim())
    failed = door.get(f"/v1/videos/{video['id']}")
    assert failed.status_code == 200
    assert body_of(failed)["status"] == "failed"
    assert body_of(failed)["error"] == {
        "code": "generation_failed",
        "message": "The pipeline said no.",
    }
    assert door.get(f"/v1/videos/{video['id']}/content").status_code == 422
    gone = created(door)
    door.post(f"/v1/requests/{gone['id']}/cancel")
    assert body_of(door.get(f"/v1/videos/{gone['id']}"))["error"]["code"] == "canceled"


def test_lists_have_pages_in_both_orders(door: Door, filming: PlayedReplica) -> None:
    ids = [created(door)["id"] for _ in range(5)]
    newest = body_of(door.get("/v1/videos?limit=2"))
    assert [video["id"] for video in newest["data"]] == [ids[4], ids[3]]
    assert (newest["first_id"], newest["last_id"], newest["has_more"]) == (ids[4], ids[3], True)
    rest = body_of(door.get(f"/v1/videos?after={ids[3]}"))
    assert [video["id"] for video in rest["data"]] == [ids[2], ids[1], ids[0]]
    assert not rest["has_more"]
    oldest = body_of(door.get(f"/v1/videos?order=asc&limit=2&after={ids[0]}"))
    assert [video["id"] for video in oldest["data"]] == [ids[1], ids[2]]
    none = body_of(door.get("/v1/videos?limit=0"))
    assert (none["data"], none["first_id"], none["has_more"]) == ([], None, True)
    assert door.get("/v1/videos?limit=101").status_code == 422
    assert door.get("/v1/videos?after=nobody").status_code == 404


def test_answers_are_as_the_spec_says(door: Door, filming: PlayedReplica) -> None:
    spec = Spec(body_of(door.get("/openapi.json")))
    video = created(door)
    one = "/v1/videos/{request_id}"
    for value, method, path in (
        (video, "post", "/v1/videos"),
        (body_of(door.get("/v1/videos")), "get", "/v1/videos"),
        (body_of(door.get(f"/v1/videos/{video['id']}")), "get", one),
        (body_of(door.delete(f"/v1/videos/{video['id']}")), "delete", one),
    ):
        schema = spec.answer_schema(method, path, 200)
        assert schema is not None
        assert list(spec.differences(value, schema)) == []
