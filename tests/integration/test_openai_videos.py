"""`/v1/videos` with a played replica: submit, poll, fetch, list, delete, and what is refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
from werkzeug.test import TestResponse

from tests.integration.api_world import (
    PIXELS,
    Api,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)
from tests.integration.image_inputs import EDITING, VIDEO
from tests.integration.spec import Spec
from tests.pictures import data_url, picture


@pytest.fixture
def filming(api: Api) -> PlayedReplica:
    return api.replica().load(VIDEO)


def create(api: Api, **fields: Any) -> TestResponse:
    """As the clients send it: a form."""
    data = {"prompt": "a moving cat", **fields}
    return api.client.post("/v1/videos", data=data, content_type="multipart/form-data")


def created(api: Api, **fields: Any) -> dict[str, Any]:
    answer = create(api, **fields)
    assert answer.status_code == 200, answer.json
    return body_of(answer)


def test_a_video_from_submit_to_file(api: Api, filming: PlayedReplica) -> None:
    video = created(api, width="64", height="32", num_frames="13", fps="4", seed="3", style="vivid")
    assert (video["object"], video["status"], video["progress"]) == ("video", "queued", 0)
    assert (video["size"], video["seconds"], video["num_frames"]) == ("64x32", "3.25", 13)
    assert video["peak_memory_mb"] == 0.0
    assert video["stage_durations"] == {}
    assert video["warnings"] == ["style has no meaning here and was ignored"]
    path = f"/v1/videos/{video['id']}"
    claimed = filming.claim()
    assert (claimed.parameters.task, claimed.parameters.seed) == ("text-to-video", 3)
    api.claims.progress(claimed, 5, 20, 0.1)
    running = body_of(api.get(path))
    assert (running["status"], running["progress"]) == ("in_progress", 25)
    assert api.get(f"{path}/content").status_code == 404
    api.claims.progress(claimed, 20, 20, 0.1)
    assert body_of(api.get(path))["progress"] == 99

    filming.succeed(claimed)
    done = body_of(api.get(path))
    assert (done["status"], done["progress"]) == ("completed", 100)
    assert done["stage_durations"]["denoise"] == 0.5
    assert done["completed_at"] >= done["created_at"]
    assert done["expires_at"] > done["completed_at"]
    content = api.get(f"{path}/content")
    assert (content.status_code, content.data) == (200, PIXELS)
    assert api.get(f"{path}/content?index=1").status_code == 404
    assert set(wrong_fields(api.get(f"{path}/content?variant=thumbnail"))) == {"variant"}

    deleted = api.delete(path)
    assert body_of(deleted) == {"id": video["id"], "object": "video.deleted", "deleted": True}
    assert api.get(path).status_code == 404
    assert api.delete(path).status_code == 404


@pytest.mark.parametrize(
    ("fields", "frames"),
    [({}, 9), ({"seconds": "1"}, 9), ({"seconds": "4"}, 33), ({"seconds": "4", "fps": "4"}, 17)],
)
def test_seconds_become_frames_that_the_model_makes(
    api: Api, filming: PlayedReplica, fields: dict[str, str], frames: int
) -> None:
    assert created(api, **fields)["num_frames"] == frames


def test_a_form_without_files_may_be_urlencoded(api: Api, filming: PlayedReplica) -> None:
    data = {"prompt": "a", "num_inference_steps": "3", "num_frames": "5"}
    answer = api.client.post("/v1/videos", data=data)
    assert answer.request.mimetype == "application/x-www-form-urlencoded"
    assert answer.status_code == 200, answer.json
    assert filming.claim().parameters.num_inference_steps == 3


def test_json_is_taken_too(api: Api, filming: PlayedReplica) -> None:
    body = {"prompt": "a", "seconds": 1, "extra_body": {"num_inference_steps": 3}}
    answer = api.client.post("/v1/videos", json=body)
    assert answer.status_code == 200, answer.json
    assert filming.claim().parameters.num_inference_steps == 3


@pytest.mark.parametrize("how", ["file", "object", "url"])
def test_a_reference_picture_makes_it_image_to_video(
    api: Api, filming: PlayedReplica, how: str
) -> None:
    red = picture(128, 64)
    ways: dict[str, dict[str, Any]] = {
        "file": {"input_reference": (io.BytesIO(red), "red.png")},
        "object": {"input_reference[image_url]": data_url(red)},
        "url": {"input_reference": data_url(red)},
    }
    video = created(api, **ways[how])
    assert video["size"] == "88x48"
    claimed = filming.claim()
    assert claimed.parameters.task == "image-to-video"
    assert api.service.outputs.read(claimed.parameters.image[0]) == red


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", "0"),
        ("seconds", "1.5"),
        ("seconds", "9999"),
        ("num_frames", "82"),
        ("num_frames", "0"),
        ("fps", "0"),
        ("num_inference_steps", "0"),
        ("num_inference_steps", "10000"),
        ("size", "64x0"),
        ("width", "0"),
        ("n", "11"),
        ("model", "sora-2"),
        ("input_reference", "https://example.org/cat.png"),
        ("aspect_ratio", "16:9"),
        ("output_format", "png"),
    ],
)
def test_wrong_fields_are_named(api: Api, filming: PlayedReplica, name: str, value: str) -> None:
    wrong = set(wrong_fields(create(api, **{name: value})))
    assert wrong == {"height" if name == "size" else name}


def test_a_field_in_two_places_is_malformed(api: Api, filming: PlayedReplica) -> None:
    assert create(api, seconds="1", num_frames="9").status_code == 400
    assert create(api, seed="1", extra_body='{"seed": 1}').status_code == 400


def test_a_model_of_pictures_makes_no_videos(api: Api, replica: PlayedReplica) -> None:
    assert set(wrong_fields(create(api))) == {"model"}
    request_id = api.submitted()["id"]
    for answer in (
        api.get(f"/v1/videos/{request_id}"),
        api.get(f"/v1/videos/{request_id}/content"),
        api.delete(f"/v1/videos/{request_id}"),
        api.get("/v1/videos/nobody"),
    ):
        assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
    assert api.get(f"/v1/requests/{request_id}").status_code == 200


def test_a_video_that_fails_says_why(api: Api, filming: PlayedReplica) -> None:
    video = created(api)
    filming.fail(filming.claim())
    failed = api.get(f"/v1/videos/{video['id']}")
    assert failed.status_code == 200
    assert body_of(failed)["status"] == "failed"
    assert body_of(failed)["error"] == {
        "code": "generation_failed",
        "message": "The pipeline said no.",
    }
    assert api.get(f"/v1/videos/{video['id']}/content").status_code == 422
    gone = created(api)
    api.post(f"/v1/requests/{gone['id']}/cancel")
    assert body_of(api.get(f"/v1/videos/{gone['id']}"))["error"]["code"] == "canceled"


def test_lists_have_pages_in_both_orders(api: Api, filming: PlayedReplica) -> None:
    ids = [created(api)["id"] for _ in range(5)]
    newest = body_of(api.get("/v1/videos?limit=2"))
    assert [video["id"] for video in newest["data"]] == [ids[4], ids[3]]
    assert (newest["first_id"], newest["last_id"], newest["has_more"]) == (ids[4], ids[3], True)
    rest = body_of(api.get(f"/v1/videos?after={ids[3]}"))
    assert [video["id"] for video in rest["data"]] == [ids[2], ids[1], ids[0]]
    assert not rest["has_more"]
    oldest = body_of(api.get(f"/v1/videos?order=asc&limit=2&after={ids[0]}"))
    assert [video["id"] for video in oldest["data"]] == [ids[1], ids[2]]
    none = body_of(api.get("/v1/videos?limit=0"))
    assert (none["data"], none["first_id"], none["has_more"]) == ([], None, True)
    assert api.get("/v1/videos?limit=101").status_code == 422
    assert api.get("/v1/videos?after=nobody").status_code == 404


@pytest.mark.parametrize("order", ["desc", "asc"])
def test_a_page_costs_what_it_shows_not_what_there_is(
    api: Api, filming: PlayedReplica, order: str
) -> None:
    ids = [created(api)["id"] for _ in range(3)]
    filming.load(EDITING)
    for _ in range(60):
        api.submitted()

    def reads() -> int:
        stats: Any = api.service.redis.info("commandstats")
        return int(stats["cmdstat_hgetall"]["calls"])

    before = reads()
    page = body_of(api.get(f"/v1/videos?limit=1&order={order}"))
    assert [video["id"] for video in page["data"]] == [ids[0] if order == "asc" else ids[2]]
    assert page["has_more"] is True
    # Two records, and the replica of the one that is shown.
    assert reads() - before <= 4


def test_a_request_that_is_edited_into_a_video_is_listed_with_them(
    api: Api, filming: PlayedReplica
) -> None:
    video = created(api)["id"]
    store = api.service.records
    request = store.get(video)
    still = request.parameters.with_changes({"task": "text-to-image"})
    request = store.edit(request, still, request.priority, timeout=None)
    assert body_of(api.get("/v1/videos"))["data"] == []
    moving = request.parameters.with_changes({"task": "text-to-video"})
    store.edit(request, moving, request.priority, timeout=None)
    assert [each["id"] for each in body_of(api.get("/v1/videos"))["data"]] == [video]


def test_answers_are_as_the_spec_says(api: Api, filming: PlayedReplica) -> None:
    spec = Spec(body_of(api.get("/openapi.json")))
    video = created(api)
    one = "/v1/videos/{request_id}"
    for value, method, path in (
        (video, "post", "/v1/videos"),
        (body_of(api.get("/v1/videos")), "get", "/v1/videos"),
        (body_of(api.get(f"/v1/videos/{video['id']}")), "get", one),
        (body_of(api.delete(f"/v1/videos/{video['id']}")), "delete", one),
    ):
        schema = spec.answer_schema(method, path, 200)
        assert schema is not None
        assert list(spec.differences(value, schema)) == []
