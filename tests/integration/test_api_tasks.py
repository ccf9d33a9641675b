"""What belongs to some tasks only: strength, frames, frames in a second, MP4 files."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from api.models.catalog import ServedModel
from api.requests.checks import complete
from configs.parameters import Abilities
from routing.request import Outcome, Output, Status
from tests.integration.api_world import (
    ABILITIES,
    Api,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)
from tests.pictures import data_url, picture

FILM = Abilities(
    tasks=("text-to-video", "image-to-video"),
    size_multiple=16,
    default_width=832,
    default_height=480,
    default_steps=50,
    default_guidance_scale=5.0,
    max_images=1,
    default_frames=81,
    frames_step=4,
    default_fps=16.0,
)
EDITING = replace(
    ABILITIES,
    tasks=("text-to-image", "image-to-image", "inpaint"),
    max_images=1,
    strength=True,
    default_strength=0.8,
)
HEUN = "FlowMatchHeunDiscreteScheduler"
FLOW = replace(
    EDITING,
    schedulers=("FlowMatchEulerDiscreteScheduler", HEUN, "UniPCMultistepScheduler"),
    full_run_schedulers=(HEUN,),
)
RED = data_url(picture(64, 48))
MASK = data_url(picture(64, 48, color="white"))


@pytest.fixture
def film(api: Api) -> PlayedReplica:
    """A ready replica of a model that makes videos."""
    return api.replica().load(FILM)


@pytest.fixture
def editing(api: Api) -> PlayedReplica:
    """A ready replica of a model that makes and changes pictures."""
    return api.replica().load(EDITING)


def test_a_video_has_the_frames_and_the_rate_of_its_model(api: Api, film: PlayedReplica) -> None:
    parameters = api.submitted()["parameters"]
    assert parameters["task"] == "text-to-video"
    assert (parameters["num_frames"], parameters["fps"]) == (81, 16.0)
    assert (parameters["output_format"], parameters["strength"]) == ("mp4", None)
    claimed = film.claim().parameters
    assert (claimed.num_frames, claimed.fps, claimed.output_format) == (81, 16.0, "mp4")
    asked = api.submitted(num_frames=5, fps=24, image=RED)["parameters"]
    assert (asked["task"], asked["num_frames"], asked["fps"]) == ("image-to-video", 5, 24)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_frames", 80, "80 is not 1 and a multiple of 4 more; use 77 or 81"),
        ("num_frames", 0, "0 is not from 1 to 1000"),
        ("num_frames", 1001, "1001 is not from 1 to 1000"),
        ("num_frames", 10**40, "is not from 1 to 1000"),
        ("num_frames", 5.5, "is not a whole number"),
        ("num_frames", 997, "are more than 134217728 pixels; use fewer or smaller ones"),
        ("fps", 0, "0 is not from 1 to 120"),
        ("fps", 121, "121 is not from 1 to 120"),
        ("fps", "16", "is not a number"),
        ("output_format", "png", "png is not available for text-to-video; use mp4"),
        ("output_compression", 50, "is only for jpeg or webp"),
        ("strength", 0.5, "is not supported by text-to-video of 'tiny'; leave it out"),
    ],
)
def test_what_a_video_cannot_have_is_refused(
    api: Api, film: PlayedReplica, field: str, value: Any, message: str
) -> None:
    wrong = wrong_fields(api.submit(**{field: value}))
    assert set(wrong) == {field}
    assert message in wrong[field]


def test_a_video_of_one_frame_is_made_from_words_alone(api: Api, film: PlayedReplica) -> None:
    assert api.submitted(num_frames=1)["parameters"]["num_frames"] == 1
    wrong = wrong_fields(api.submit(num_frames=1, image=RED))
    assert wrong == {"num_frames": "1 frame would be the image that was given; use 5 or more"}


def test_strength_is_that_of_the_model_for_image_to_image(api: Api, editing: PlayedReplica) -> None:
    assert api.submitted(image=RED)["parameters"]["strength"] == 0.8
    assert api.submitted(image=RED, strength=0.3)["parameters"]["strength"] == 0.3
    assert api.submitted(image=RED, mask_image=MASK)["parameters"]["strength"] is None
    assert api.submitted()["parameters"]["strength"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strength": 1.5}, "1.5 is not from 0 to 1"),
        ({"strength": -0.1}, "-0.1 is not from 0 to 1"),
        ({"strength": 0}, "0 of 20 steps is less than one step; give 0.05 or more"),
        ({"strength": 0.04}, "0.04 of 20 steps is less than one step; give 0.05 or more"),
        ({"strength": 0.5, "num_inference_steps": 1}, "0.5 of 1 steps is less than one step"),
        ({"strength": True}, "is not a number"),
    ],
)
def test_a_strength_that_makes_nothing_is_refused(
    api: Api, editing: PlayedReplica, fields: dict[str, Any], message: str
) -> None:
    wrong = wrong_fields(api.submit(image=RED, **fields))
    assert set(wrong) == {"strength"}
    assert message in wrong["strength"]


def test_strength_without_an_image_is_refused(api: Api, editing: PlayedReplica) -> None:
    wrong = wrong_fields(api.submit(strength=0.5))
    assert wrong == {"strength": "is not supported by text-to-image of 'tiny'; leave it out"}


def test_a_waiting_video_can_be_changed(api: Api, film: PlayedReplica) -> None:
    api.submitted()
    request = api.submitted()
    changed = api.patch(request["id"], num_frames=49, fps=None)
    assert changed.status_code == 200
    assert body_of(changed)["parameters"]["num_frames"] == 49
    assert body_of(changed)["parameters"]["fps"] == 16.0
    assert set(wrong_fields(api.patch(request["id"], num_frames=50))) == {"num_frames"}


def test_a_model_says_what_its_videos_can_be(api: Api, film: PlayedReplica) -> None:
    model = body_of(api.get("/v1/models"))["data"][0]
    assert model["tasks"] == ["text-to-video", "image-to-video"]
    assert (model["output_formats"], model["frames_step"]) == (["mp4"], 4)
    takes = {name for name, takes in model["takes"].items() if takes}
    assert takes == {"negative_prompt", "guidance_scale", "image", "num_frames", "fps"}
    assert model["limits"]["images"] == 1
    assert model["limits"]["num_frames"] == 1000
    assert model["limits"]["video_pixels"] == 134_217_728
    assert (model["defaults"]["num_frames"], model["defaults"]["fps"]) == (81, 16.0)


def test_a_model_says_what_its_edits_can_be(api: Api, editing: PlayedReplica) -> None:
    model = body_of(api.get("/v1/models"))["data"][0]
    assert (model["output_formats"], model["frames_step"]) == (["png", "jpeg", "webp"], None)
    assert (model["takes"]["image"], model["takes"]["mask_image"]) == (True, True)
    assert (model["takes"]["strength"], model["takes"]["fps"]) == (True, False)
    assert model["limits"]["num_frames"] is None
    assert model["defaults"]["strength"] == 0.8
    assert "fps" not in model["defaults"]


def test_a_video_can_be_had_whole_and_in_parts(api: Api, film: PlayedReplica) -> None:
    url = f"/v1/requests/{api.submitted()['id']}"
    request = film.claim()
    data = bytes(range(256)) * 4
    name = f"{request.id}/1-0.mp4"
    api.service.outputs.write(name, data)
    digest = hashlib.sha256(data).hexdigest()
    output = Output(name, "video/mp4", 832, 480, 7, len(data), digest, 81, 16.0)
    outcome = Outcome(Status.SUCCEEDED, (output,), step=50, steps=50)
    api.claims.finish(request, outcome)
    shown = body_of(api.get(url))["outputs"][0]
    assert (shown["media_type"], shown["num_frames"], shown["fps"]) == ("video/mp4", 81, 16.0)

    whole = api.get(shown["url"])
    assert (whole.status_code, whole.mimetype, whole.data) == (200, "video/mp4", data)
    assert whole.headers["Accept-Ranges"] == "bytes"
    part = api.get(shown["url"], Range="bytes=100-199")
    assert (part.status_code, part.data) == (206, data[100:200])
    assert part.headers["Content-Range"] == "bytes 100-199/1024"
    assert api.get(shown["url"], Range="bytes=1000-").data == data[1000:]
    other = api.get(shown["url"], Range="bytes=0-1", If_Range='"another"')
    assert (other.status_code, other.data) == (200, data)
    beyond = api.get(shown["url"], Range="bytes=5000-")
    assert beyond.status_code == 416
    assert error_of(beyond)["message"]


def test_a_scheduler_that_begins_at_the_first_step_is_refused_where_a_strength_goes(
    api: Api,
) -> None:
    api.replica().load(FLOW)
    assert api.submitted(scheduler=HEUN)["parameters"]["scheduler"] == HEUN
    either: tuple[dict[str, Any], ...] = ({"image": RED}, {"image": RED, "mask_image": MASK})
    for images in either:
        wrong = wrong_fields(api.submit(scheduler=HEUN, **images))
        assert set(wrong) == {"scheduler"}
        assert "use FlowMatchEulerDiscreteScheduler or UniPC" in wrong["scheduler"]
        assert api.submitted(scheduler="UniPCMultistepScheduler", **images)
    model = body_of(api.get("/v1/models"))["data"][0]
    assert model["schedulers"] == list(FLOW.schedulers)
    assert model["full_run_schedulers"] == [HEUN]


def test_a_stage_s_scheduler_that_a_task_refuses_gives_way_to_the_model_s_own(api: Api) -> None:
    api.replica().load(FLOW)
    model = ServedModel("tiny", 0, FLOW, {"scheduler": HEUN})
    settings = api.service.settings
    assert complete({}, model, settings)["scheduler"] == HEUN
    for task in ("image-to-image", "inpaint"):
        given = {"task": task, "width": 64, "height": 64}
        assert "scheduler" not in complete(given, model, settings)


def test_the_adapters_and_the_scheduler_of_a_stage_are_those_of_its_requests(api: Api) -> None:
    lightning = {"name": "lightning", "scale": 0.5}
    said = {"flow_shift": {"value": 8.0, "saved": 3.0, "source": "https://github.com/Wan-Video"}}
    fast = replace(
        EDITING,
        schedulers=("LCMScheduler",),
        scheduler_steps={"LCMScheduler": 50},
        scheduler_settings=said,
        loras=("lightning", "style"),
        default_lora=(lightning,),
        guidance_scale=False,
    )
    api.replica().load(fast)
    assert api.submitted()["parameters"]["lora"] == [lightning]
    assert api.submitted(lora=None)["parameters"]["lora"] == [lightning]
    assert api.submitted(lora=[])["parameters"]["lora"] == []
    other = {"name": "style", "scale": 1.0}
    assert api.submitted(lora=other)["parameters"]["lora"] == [other]
    model = body_of(api.get("/v1/models"))["data"][0]
    assert model["defaults"]["lora"] == [lightning]
    assert model["scheduler_settings"] == said
    wrong = wrong_fields(api.submit(num_inference_steps=51))
    assert wrong == {
        "num_inference_steps": "51 is more than the 50 steps that LCMScheduler has; use fewer"
    }
    for scale in (0, 1):  # nothing is asked for
        assert api.submitted(guidance_scale=scale, num_inference_steps=50)
    assert set(wrong_fields(api.submit(guidance_scale=2))) == {"guidance_scale"}
