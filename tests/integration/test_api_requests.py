"""The calls of a request's life, over real Redis, with played replicas."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from configs.parameters import Abilities, Lora
from configs.settings import Settings
from tests.integration.api_world import (
    ABILITIES,
    MODEL,
    Api,
    PlayedReplica,
    body_of,
    wrong_fields,
)
from tests.integration.conftest import ApiOpener


def test_adapters_are_taken_one_or_several_and_edited(api: Api, replica: PlayedReplica) -> None:
    assert body_of(api.get("/v1/models"))["data"][0]["loras"] == ["ink", "pixel"]
    one = api.submitted(lora={"name": "pixel"})
    assert one["parameters"]["lora"] == [{"name": "pixel", "scale": 1.0}]
    two = api.submitted(lora=[{"name": "pixel", "scale": -2}, {"name": "ink", "scale": 0.5}])
    assert two["parameters"]["lora"] == [
        {"name": "pixel", "scale": -2.0},
        {"name": "ink", "scale": 0.5},
    ]
    url = f"/v1/requests/{two['id']}"
    assert body_of(api.patch(two["id"], seed=5))["parameters"]["lora"] == two["parameters"]["lora"]
    changed = body_of(api.patch(two["id"], lora={"name": "ink"}))
    assert changed["parameters"]["lora"] == [{"name": "ink", "scale": 1.0}]
    assert body_of(api.patch(two["id"], lora=None))["parameters"]["lora"] == []
    assert body_of(api.get(url))["parameters"]["lora"] == []
    assert api.submitted(lora=[])["parameters"]["lora"] == []
    assert replica.claim().parameters.lora == (Lora("pixel", 1.0),)


def test_a_submit_is_accepted_with_all_its_parameters(api: Api, replica: PlayedReplica) -> None:
    before = time.time()
    answer = api.submit(seed=7, metadata={"who": "me"})
    request = body_of(answer)
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/v1/requests/{request['id']}"
    assert request["object"] == "request"
    assert request["status"] == "queued"
    assert request["model"] == "tiny"
    assert request["task"] == "text-to-image"
    assert request["replica"] == replica.name
    assert request["queue_position"] == 1
    assert before - 1 < request["created_at"] < time.time() + 1
    assert request["started_at"] is None
    assert request["parameters"] == {
        "prompt": "a red circle",
        "seed": 7,
        "width": 64,
        "height": 64,
        "num_inference_steps": 20,
        "task": "text-to-image",
        "negative_prompt": None,
        "guidance_scale": 3.0,
        "true_cfg_scale": None,
        "guidance_scale_2": None,
        "guidance_rescale": None,
        "clip_skip": None,
        "prompt_weighting": False,
        "max_sequence_length": None,
        "num_outputs_per_prompt": 1,
        "scheduler": None,
        "output_format": "png",
        "output_compression": None,
        "deterministic": False,
        "lora": [],
        "image": [],
        "mask_image": None,
        "padding_mask_crop": None,
        "strength": None,
        "num_frames": None,
        "fps": None,
        "preview": False,
    }
    assert request["progress"] == {"step": 0, "steps": 20, "fraction": 0.0, "eta_s": None}
    assert request["metadata"] == {"who": "me"}
    assert request["urls"]["get"] == answer.headers["Location"]
    assert body_of(api.get(answer.headers["Location"])) == request


def test_a_seed_left_out_is_drawn_and_kept(api: Api, replica: PlayedReplica) -> None:
    seeds = {api.submitted()["parameters"]["seed"] for _ in range(5)}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert replica.claim().parameters.seed in seeds


def test_the_stage_file_and_the_pipeline_give_the_defaults(
    api_settings: Settings, open_api: ApiOpener, replica: PlayedReplica, tmp_path: Path
) -> None:
    text = api_settings.stage_configs_path.read_text()
    more = (
        "    default_sampling_params:\n      negative_prompt: blurry\n      output_format: webp\n"
    )
    path = tmp_path / "stages.yaml"
    path.write_text(text.replace("    default_sampling_params:\n", more))
    other = open_api(replace(api_settings, stage_configs_path=path))
    parameters = other.submitted()["parameters"]
    assert parameters["negative_prompt"] == "blurry"
    assert parameters["output_format"] == "webp"
    assert other.submitted(output_format="png")["parameters"]["output_format"] == "png"


def test_size_is_width_and_height_in_one(api: Api, replica: PlayedReplica) -> None:
    parameters = api.submitted(size="96x32")["parameters"]
    assert (parameters["width"], parameters["height"]) == (96, 32)
    assert set(wrong_fields(api.submit(size="96x32", width=96))) == {"size"}
    assert set(wrong_fields(api.submit(size="large"))) == {"size"}


def test_null_counts_as_not_given(api: Api, replica: PlayedReplica) -> None:
    request = api.submitted(seed=None, width=None, model=None, scheduler=None, lora=None)
    assert request["parameters"]["width"] == 64


def test_a_request_runs_to_its_outputs(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted(num_outputs_per_prompt=2, seed=40)["id"]
    path = f"/v1/requests/{request_id}"
    claimed = replica.claim()
    running = body_of(api.get(path))
    assert (running["status"], running["queue_position"]) == ("running", None)
    assert running["started_at"] is not None

    api.claims.progress(claimed, 5, 20, 0.1)
    assert body_of(api.get(path))["progress"] == {
        "step": 5,
        "steps": 20,
        "fraction": 0.25,
        "eta_s": 1.5,
    }
    replica.succeed(claimed)
    done = body_of(api.get(path))
    assert done["status"] == "succeeded"
    assert done["progress"] == {"step": 20, "steps": 20, "fraction": 1.0, "eta_s": None}
    assert done["timings"]["denoise_s"] == 0.5
    assert done["timings"]["total_s"] >= done["timings"]["queued_s"] >= 0
    assert [output["seed"] for output in done["outputs"]] == [40, 41]
    assert [output["url"] for output in done["outputs"]] == [
        f"{path}/outputs/0",
        f"{path}/outputs/1",
    ]
    assert done["outputs"][0]["expires_at"] == pytest.approx(done["finished_at"] + 86_400)


def test_a_failed_request_says_why(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    replica.fail(replica.claim())
    failed = body_of(api.get(f"/v1/requests/{request_id}"))
    assert failed["status"] == "failed"
    assert failed["error"] == {
        "code": "generation_failed",
        "message": "The pipeline said no.",
        "retryable": False,
    }
    assert failed["outputs"] == []


def test_requests_of_one_affinity_key_go_to_one_replica(api: Api) -> None:
    for name in ("replica0", "replica1"):
        api.replica(name).load()
    requests = [api.submitted(affinity_key="me") for _ in range(4)]
    assert {request["affinity_key"] for request in requests} == {"me"}
    assert len({request["replica"] for request in requests}) == 1
    first, *rest = [api.submitted()["replica"] for _ in range(3)]
    assert first not in {request["replica"] for request in requests}  # it is idle
    assert {first, *rest} == {"replica0", "replica1"}
    assert api.submitted()["affinity_key"] is None


def test_what_a_model_counts_is_bounded_by_its_own_number(api: Api, replica: PlayedReplica) -> None:
    replica.load(replace(ABILITIES, clip_skip=11, max_sequence_length=512))
    asked = api.submitted(clip_skip=11, max_sequence_length=512)
    assert asked["parameters"]["clip_skip"] == 11
    assert api.submitted(guidance_rescale=0)["parameters"]["guidance_rescale"] == 0
    answer = api.submit(clip_skip=12, max_sequence_length=513, guidance_rescale=0.5)
    assert wrong_fields(answer) == {
        "clip_skip": "12 is not from 0 to 11",
        "max_sequence_length": "513 is not from 1 to 512",
        "guidance_rescale": f"is not supported by {MODEL!r}; leave it out",
    }
    (model,) = body_of(api.get("/v1/models"))["data"]
    assert model["takes"]["clip_skip"] is True
    assert model["takes"]["guidance_rescale"] is False
    assert (model["limits"]["clip_skip"], model["limits"]["max_sequence_length"]) == (11, 512)


def test_a_model_that_takes_no_guidance_is_asked_for_none(api: Api, replica: PlayedReplica) -> None:
    bare = Abilities(**{**ABILITIES.to_json(), "guidance_scale": False, "negative_prompt": False})
    replica.load(replace(bare, default_guidance_scale=None))
    answer = api.submit(guidance_scale=3.0, negative_prompt="blurry")
    assert set(wrong_fields(answer)) == {"guidance_scale", "negative_prompt"}
    assert api.submitted()["parameters"]["guidance_scale"] is None
    # Cards of models without guidance write 0 or 1.
    for off in (0, 1):
        asked = api.submitted(guidance_scale=off, true_cfg_scale=off)["parameters"]
        assert (asked["guidance_scale"], asked["true_cfg_scale"]) == (off, off)
