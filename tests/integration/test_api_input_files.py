"""The stored files of input images live as long as their request, and no longer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from configs.settings import Settings
from tests.integration.api_world import (
    Api,
    PlayedReplica,
    body_of,
    error_of,
)
from tests.integration.conftest import ApiOpener
from tests.integration.image_inputs import BLUE, EDITING, MASK, RED, file, files
from tests.pictures import data_url


def test_files_go_with_the_request(
    api: Api, editing: PlayedReplica, api_settings: Settings
) -> None:
    request_id = api.submitted(image=data_url(RED), mask_image=data_url(MASK))["id"]
    assert len(files(api_settings, request_id)) == 2
    assert api.delete(f"/v1/requests/{request_id}").status_code == 204
    assert files(api_settings, request_id) == []


def test_a_submit_that_is_refused_leaves_no_files(
    api_settings: Settings, open_api: ApiOpener
) -> None:
    api = open_api(replace(api_settings, max_waiting_per_replica=1))
    api.replica().load(EDITING)
    api.submitted()
    assert api.submit(image=data_url(RED)).status_code == 429
    folder = Path(api_settings.outputs_url.removeprefix("file://"))
    left = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    assert left == []


def test_an_idempotency_key_knows_the_pictures(
    api: Api, editing: PlayedReplica, api_settings: Settings
) -> None:
    key = {"Idempotency-Key": "one"}
    first = body_of(api.submit(key, image=data_url(RED)))
    again = api.submit(key, image=[data_url(RED, "image/webp")])
    assert again.status_code == 200
    assert body_of(again)["id"] == first["id"]
    assert api.submit(key, image=data_url(BLUE)).status_code == 409
    folder = Path(api_settings.outputs_url.removeprefix("file://"))
    assert [path.parent.name for path in folder.rglob("*") if path.is_file()] == [first["id"]]


def test_the_images_of_a_waiting_request_can_be_changed(
    api: Api, editing: PlayedReplica, api_settings: Settings
) -> None:
    request_id = api.submitted(size="64x64")["id"]
    edited = body_of(api.patch(request_id, image=data_url(RED)))
    assert edited["task"] == "image-to-image"
    assert (edited["parameters"]["width"], edited["parameters"]["height"]) == (64, 64)
    back = body_of(api.patch(request_id, width=None, height=None))
    assert (back["parameters"]["width"], back["parameters"]["height"]) == (80, 56)
    form = {"image": file(BLUE), "mask_image": file(MASK), "seed": "5"}
    other = api.client.patch(
        f"/v1/requests/{request_id}", data=form, content_type="multipart/form-data"
    )
    assert other.status_code == 200, other.json
    assert body_of(other)["task"] == "inpaint"
    assert body_of(other)["parameters"]["seed"] == 5
    assert api.get(f"/v1/requests/{request_id}/inputs/0").data == BLUE
    assert len(files(api_settings, request_id)) == 2
    none = body_of(api.patch(request_id, image=None, mask_image=None))
    assert (none["task"], none["parameters"]["image"]) == ("text-to-image", [])
    assert files(api_settings, request_id) == []


def test_an_edit_that_is_refused_changes_no_file(
    api: Api, editing: PlayedReplica, api_settings: Settings
) -> None:
    request_id = api.submitted(image=data_url(RED))["id"]
    before = files(api_settings, request_id)
    assert api.patch(request_id, image=[data_url(BLUE)] * 3).status_code == 422
    claimed = editing.claim()
    assert api.patch(request_id, image=data_url(BLUE)).status_code == 409
    assert files(api_settings, request_id) == before
    editing.stop(claimed)
    assert api.patch(request_id, image=data_url(BLUE)).status_code == 409
    assert files(api_settings, request_id) == before


def test_inputs_that_cannot_be_stored_refuse_the_submit(
    api_settings: Settings, open_api: ApiOpener, editing: PlayedReplica, tmp_path: Path
) -> None:
    wall = tmp_path / "wall"
    wall.write_text("a file where the folder should be")
    api = open_api(replace(api_settings, outputs_url=f"file://{wall}"))
    answer = api.submit(image=data_url(RED))
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "store_unavailable"
    assert "Retry-After" in answer.headers
    assert body_of(api.get("/v1/requests"))["data"] == []
