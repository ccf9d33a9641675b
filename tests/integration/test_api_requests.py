"""The calls of a request's life, over real Redis, with played replicas."""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.settings import Settings
from routing.parameters import Abilities, Lora
from tests.integration.api_world import (
    ABILITIES,
    PIXELS,
    Door,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)
from tests.integration.conftest import OpenDoor
from tests.waiting import wait_until


def test_adapters_are_taken_one_or_several_and_edited(door: Door, replica: PlayedReplica) -> None:
    assert body_of(door.get("/v1/models"))["data"][0]["loras"] == ["ink", "pixel"]
    one = door.submitted(lora={"name": "pixel"})
    assert one["parameters"]["lora"] == [{"name": "pixel", "scale": 1.0}]
    two = door.submitted(lora=[{"name": "pixel", "scale": -2}, {"name": "ink", "scale": 0.5}])
    assert two["parameters"]["lora"] == [
        {"name": "pixel", "scale": -2.0},
        {"name": "ink", "scale": 0.5},
    ]
    url = f"/v1/requests/{two['id']}"
    assert body_of(door.patch(two["id"], seed=5))["parameters"]["lora"] == two["parameters"]["lora"]
    changed = body_of(door.patch(two["id"], lora={"name": "ink"}))
    assert changed["parameters"]["lora"] == [{"name": "ink", "scale": 1.0}]
    assert body_of(door.patch(two["id"], lora=None))["parameters"]["lora"] == []
    assert body_of(door.get(url))["parameters"]["lora"] == []
    assert door.submitted(lora=[])["parameters"]["lora"] == []
    assert replica.claim().parameters.lora == (Lora("pixel", 1.0),)


def test_a_submit_is_accepted_with_all_its_parameters(door: Door, replica: PlayedReplica) -> None:
    before = time.time()
    answer = door.submit(seed=7, metadata={"who": "me"})
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
        "num_outputs_per_prompt": 1,
        "scheduler": None,
        "output_format": "png",
        "output_compression": None,
        "deterministic": False,
        "lora": [],
        "image": [],
        "mask_image": None,
        "strength": None,
        "num_frames": None,
        "fps": None,
        "preview": False,
    }
    assert request["progress"] == {"step": 0, "steps": 20, "fraction": 0.0, "eta_s": None}
    assert request["metadata"] == {"who": "me"}
    assert request["urls"]["get"] == answer.headers["Location"]
    assert body_of(door.get(answer.headers["Location"])) == request


def test_a_seed_left_out_is_drawn_and_kept(door: Door, replica: PlayedReplica) -> None:
    seeds = {door.submitted()["parameters"]["seed"] for _ in range(5)}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert replica.claim().parameters.seed in seeds


def test_the_stage_file_and_the_pipeline_give_the_defaults(
    api_settings: Settings, open_door: OpenDoor, replica: PlayedReplica, tmp_path: Path
) -> None:
    text = api_settings.stage_configs_path.read_text()
    more = (
        "    default_sampling_params:\n      negative_prompt: blurry\n      output_format: webp\n"
    )
    path = tmp_path / "stages.yaml"
    path.write_text(text.replace("    default_sampling_params:\n", more))
    other = open_door(replace(api_settings, stage_configs_path=path))
    parameters = other.submitted()["parameters"]
    assert parameters["negative_prompt"] == "blurry"
    assert parameters["output_format"] == "webp"
    assert other.submitted(output_format="png")["parameters"]["output_format"] == "png"


def test_size_is_width_and_height_in_one(door: Door, replica: PlayedReplica) -> None:
    parameters = door.submitted(size="96x32")["parameters"]
    assert (parameters["width"], parameters["height"]) == (96, 32)
    assert set(wrong_fields(door.submit(size="96x32", width=96))) == {"size"}
    assert set(wrong_fields(door.submit(size="large"))) == {"size"}


def test_null_counts_as_not_given(door: Door, replica: PlayedReplica) -> None:
    request = door.submitted(seed=None, width=None, model=None, scheduler=None, lora=None)
    assert request["parameters"]["width"] == 64


def test_a_request_runs_to_its_outputs(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted(num_outputs_per_prompt=2, seed=40)["id"]
    path = f"/v1/requests/{request_id}"
    claimed = replica.claim()
    running = body_of(door.get(path))
    assert (running["status"], running["queue_position"]) == ("running", None)
    assert running["started_at"] is not None

    door.service.router.claims.progress(claimed, 5, 20, 0.1)
    assert body_of(door.get(path))["progress"] == {
        "step": 5,
        "steps": 20,
        "fraction": 0.25,
        "eta_s": 1.5,
    }
    replica.succeed(claimed)
    done = body_of(door.get(path))
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


def test_a_failed_request_says_why(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    replica.fail(replica.claim())
    failed = body_of(door.get(f"/v1/requests/{request_id}"))
    assert failed["status"] == "failed"
    assert failed["error"] == {
        "code": "generation_failed",
        "message": "The pipeline said no.",
        "retryable": False,
    }
    assert failed["outputs"] == []


# --- waiting ------------------------------------------------------------------


def test_a_held_call_is_woken_by_the_end(door: Door, replica: PlayedReplica) -> None:
    door.start()
    request_id = door.submitted()["id"]
    claimed = replica.claim()
    with ThreadPoolExecutor() as pool:
        started = time.monotonic()
        held = pool.submit(door.get, f"/v1/requests/{request_id}", Prefer="wait=30")
        wait_until(lambda: held_calls(door) == 1, 5, "the call to be held")
        replica.succeed(claimed)
        answer = held.result(timeout=5)
    assert time.monotonic() - started < 5
    assert answer.status_code == 200
    assert answer.headers["Preference-Applied"] == "wait=30"
    assert body_of(answer)["status"] == "succeeded"


def test_a_submit_that_waits_answers_200_with_the_end(door: Door, replica: PlayedReplica) -> None:
    door.start()
    with ThreadPoolExecutor() as pool:
        held = pool.submit(door.submit, {"Prefer": "wait=30"})
        wait_until(lambda: held_calls(door) == 1, 5, "the call to be held")
        replica.succeed(replica.claim())
        answer = held.result(timeout=5)
    assert answer.status_code == 200
    assert answer.headers["Preference-Applied"] == "wait=30"
    assert answer.headers["Location"] == f"/v1/requests/{body_of(answer)['id']}"
    assert body_of(answer)["status"] == "succeeded"


def test_a_wait_that_runs_out_answers_with_the_request_as_it_stands(
    door: Door, replica: PlayedReplica
) -> None:
    door.start()
    started = time.monotonic()
    answer = door.submit({"Prefer": "respond-async, wait=1"})
    assert 0.9 < time.monotonic() - started < 4
    assert answer.status_code == 202
    assert answer.headers["Preference-Applied"] == "wait=1"
    looked = door.get(answer.headers["Location"], Prefer="wait=1")
    assert looked.status_code == 200
    assert body_of(looked)["status"] == "queued"


def test_a_wait_is_cut_to_the_longest_allowed(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    replica.succeed(replica.claim())
    answer = door.get(f"/v1/requests/{request_id}", Prefer="wait=3600")
    assert answer.headers["Preference-Applied"] == "wait=60"
    assert "Preference-Applied" not in door.get(f"/v1/requests/{request_id}").headers
    unwaited = door.get(f"/v1/requests/{request_id}", Prefer="handling=strict")
    assert "Preference-Applied" not in unwaited.headers
    assert door.get(f"/v1/requests/{request_id}", Prefer="wait=soon").status_code == 400


def test_held_calls_are_bounded_and_hold_up_nobody_else(
    api_settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(replace(api_settings, max_long_polls=3)).start()
    replica = door.replica().load()
    path = f"/v1/requests/{door.submitted()['id']}"
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(door.get, path, Prefer="wait=30") for _ in range(3)]
        wait_until(lambda: held_calls(door) == 3, 5, "three held calls")
        refused = door.get(path, Prefer="wait=30")
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "too_many_waits"
        assert refused.headers["Retry-After"] == "1"
        assert door.get(path).status_code == 200
        accepted = door.submit({"Prefer": "wait=30"})
        assert accepted.status_code == 202
        assert "Preference-Applied" not in accepted.headers
        replica.succeed(replica.claim())
        assert [call.result(timeout=5).status_code for call in held] == [200] * 3
    wait_until(lambda: held_calls(door) == 0, 5, "no held call")


def test_a_door_that_closes_lets_its_held_calls_go(door: Door, replica: PlayedReplica) -> None:
    door.start()
    path = f"/v1/requests/{door.submitted()['id']}"
    with ThreadPoolExecutor() as pool:
        held = pool.submit(door.get, path, Prefer="wait=30")
        wait_until(lambda: held_calls(door) == 1, 5, "the call to be held")
        door.service.held_calls.close()
        answer = held.result(timeout=5)
    assert answer.status_code == 200
    assert body_of(answer)["status"] == "queued"


def test_a_call_held_for_a_removed_request_answers_404(door: Door, replica: PlayedReplica) -> None:
    door.start()
    path = f"/v1/requests/{door.submitted()['id']}"
    with ThreadPoolExecutor() as pool:
        held = pool.submit(door.get, path, Prefer="wait=30")
        wait_until(lambda: held_calls(door) == 1, 5, "the call to be held")
        assert door.delete(path).status_code == 204
        assert held.result(timeout=5).status_code == 404


def held_calls(door: Door) -> int:
    return door.service.held_calls.count


# --- idempotency --------------------------------------------------------------


def test_the_same_key_and_body_submit_once(door: Door, replica: PlayedReplica) -> None:
    headers = {"Idempotency-Key": "order 66"}
    first = door.submit(headers, width=64, height=32)
    again = door.client.post(
        "/v1/requests",
        data='{"height": 32,  "prompt": "a red circle", "width": 64}',
        content_type="application/json",
        headers=headers,
    )
    assert (first.status_code, again.status_code) == (202, 200)
    assert body_of(first) == body_of(again)
    other = door.submit(headers, width=32, height=64)
    assert other.status_code == 409
    assert error_of(other)["code"] == "idempotency_key_reused"
    assert error_of(other)["param"] == "Idempotency-Key"


@pytest.mark.parametrize("key", ["", "k" * 256, "sp\u00e9cial"])
def test_a_key_that_is_none_is_refused(door: Door, replica: PlayedReplica, key: str) -> None:
    answer = door.submit({"Idempotency-Key": key})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "Idempotency-Key"


def test_two_doors_with_one_key_at_the_same_instant_submit_once(
    door: Door, replica: PlayedReplica, open_door: OpenDoor, api_settings: Settings
) -> None:
    doors = [door, open_door(api_settings)]
    gate = threading.Barrier(8)

    def submit(number: int):
        gate.wait(10)
        return doors[number % 2].submit({"Idempotency-Key": "one"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [202]
    assert len({body_of(answer)["id"] for answer in answers}) == 1
    assert len(body_of(door.get("/v1/requests"))["data"]) == 1


# --- lists --------------------------------------------------------------------


def test_requests_are_listed_newest_first_in_pages(door: Door, replica: PlayedReplica) -> None:
    ids = [door.submitted()["id"] for _ in range(5)][::-1]
    first = body_of(door.get("/v1/requests?limit=2"))
    assert first["object"] == "list"
    assert [request["id"] for request in first["data"]] == ids[:2]
    assert first["has_more"] is True
    second = body_of(door.get(f"/v1/requests?limit=3&after={ids[1]}"))
    assert [request["id"] for request in second["data"]] == ids[2:]
    assert second["has_more"] is False
    assert [request["queue_position"] for request in second["data"]] == [3, 2, 1]


def test_lists_are_filtered_by_status_and_model(door: Door, replica: PlayedReplica) -> None:
    ended, waiting = door.submitted()["id"], door.submitted()["id"]
    replica.succeed(replica.claim())

    def listed(query: str) -> list[str]:
        return [request["id"] for request in body_of(door.get(f"/v1/requests?{query}"))["data"]]

    assert listed("status=succeeded") == [ended]
    assert listed("status=queued&model=tiny") == [waiting]
    assert listed("model=other") == []
    assert listed("status=succeeded&model=other") == []
    assert listed(f"status=queued&after={ended}") == []
    assert listed(f"status=succeeded&after={waiting}") == [ended]


def test_a_filtered_page_costs_what_it_shows_not_what_there_is(
    door: Door, replica: PlayedReplica
) -> None:
    old = [door.submitted()["id"] for _ in range(3)]
    for _ in range(120):
        request = door.submitted()["id"]
        door.post(f"/v1/requests/{request}/cancel")

    def reads() -> int:
        stats: Any = door.service.redis.info("commandstats")
        return int(stats["cmdstat_hgetall"]["calls"])

    before = reads()
    page = body_of(door.get("/v1/requests?status=queued&model=tiny&limit=2"))
    assert [request["id"] for request in page["data"]] == old[:0:-1]
    assert page["has_more"] is True
    assert reads() - before <= 3


def test_requests_of_one_affinity_key_go_to_one_replica(door: Door) -> None:
    for name in ("replica0", "replica1"):
        door.replica(name).load()
    requests = [door.submitted(affinity_key="me") for _ in range(4)]
    assert {request["affinity_key"] for request in requests} == {"me"}
    assert len({request["replica"] for request in requests}) == 1
    assert {door.submitted()["replica"] for _ in range(2)} == {"replica0", "replica1"}
    assert door.submitted()["affinity_key"] is None


def test_wrong_queries_are_refused(door: Door, replica: PlayedReplica) -> None:
    answer = door.get("/v1/requests?status=done&limit=0&colour=red")
    assert set(wrong_fields(answer)) == {"status", "limit", "colour"}
    assert set(wrong_fields(door.get("/v1/requests?limit=many"))) == {"limit"}
    assert door.get("/v1/requests?after=req_unknown").status_code == 404


# --- outputs ------------------------------------------------------------------


def test_an_output_is_a_file_that_may_be_kept(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    path = f"/v1/requests/{request_id}/outputs/0"
    early = door.get(path)
    assert early.status_code == 404
    assert "queued" in error_of(early)["message"]
    replica.succeed(replica.claim())
    answer = door.get(path)
    assert answer.status_code == 200
    assert answer.data == PIXELS
    assert answer.mimetype == "image/png"
    assert answer.headers["ETag"] == f'"{hashlib.sha256(PIXELS).hexdigest()}"'
    assert answer.headers["Content-Disposition"] == f'inline; filename="{request_id}-0.png"'
    assert "immutable" in answer.headers["Cache-Control"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    kept = door.get(path, If_None_Match=answer.headers["ETag"])
    assert (kept.status_code, kept.data) == (304, b"")
    assert kept.headers["ETag"] == answer.headers["ETag"]
    assert door.get(path, If_None_Match='"other"').status_code == 200
    missing = door.get(f"/v1/requests/{request_id}/outputs/1")
    assert missing.status_code == 404
    assert error_of(missing)["param"] == "index"


def test_a_file_that_is_gone_is_404(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    replica.succeed(replica.claim())
    door.service.router.outputs.remove(request_id)
    assert door.get(f"/v1/requests/{request_id}/outputs/0").status_code == 404


# --- edits --------------------------------------------------------------------


def test_a_waiting_request_can_be_changed_in_everything(door: Door, replica: PlayedReplica) -> None:
    door.submitted(priority="high")
    request = door.submitted(seed=5, timeout=30)
    assert request["queue_position"] == 2
    answer = door.patch(
        request["id"],
        prompt="a blue square",
        size="32x32",
        num_inference_steps=4,
        priority="high",
        timeout=60,
        expires_in=100,
    )
    assert answer.status_code == 200
    changed = body_of(answer)
    assert changed["parameters"] == {
        **request["parameters"],
        "prompt": "a blue square",
        "width": 32,
        "height": 32,
        "num_inference_steps": 4,
    }
    assert changed["priority"] == "high"
    assert changed["timeout"] == 60
    assert changed["start_by"] == pytest.approx(request["created_at"] + 100, abs=0.01)
    kept = body_of(door.patch(request["id"], seed=6))
    assert (kept["timeout"], kept["priority"]) == (60, "high")
    assert kept["start_by"] == changed["start_by"]


def test_null_in_an_edit_puts_the_default_back(door: Door, replica: PlayedReplica) -> None:
    request = door.submitted(
        output_format="jpeg", output_compression=50, width=32, timeout=5, negative_prompt="blur"
    )
    answer = door.patch(
        request["id"],
        output_format=None,
        output_compression=None,
        width=None,
        timeout=None,
        negative_prompt=None,
    )
    changed = body_of(answer)
    assert changed["parameters"]["output_format"] == "png"
    assert changed["parameters"]["output_compression"] is None
    assert changed["parameters"]["width"] == 64
    assert changed["parameters"]["negative_prompt"] is None
    assert changed["timeout"] is None
    assert set(wrong_fields(door.patch(request["id"], prompt=None))) == {"prompt"}
    assert set(wrong_fields(door.patch(request["id"], expires_in=None))) == {"expires_in"}


def test_an_edit_is_checked_like_a_new_request(door: Door, replica: PlayedReplica) -> None:
    request = door.submitted(output_format="jpeg", output_compression=50)
    answer = door.patch(
        request["id"], width=65, num_inference_steps=0, stepz=1, output_format="png"
    )
    assert set(wrong_fields(answer)) == {"stepz"}
    answer = door.patch(request["id"], width=65, num_inference_steps=0, output_format="png")
    assert set(wrong_fields(answer)) == {"width", "num_inference_steps", "output_compression"}
    assert body_of(door.get(f"/v1/requests/{request['id']}")) == request
    assert body_of(door.patch(request["id"])) == request


@pytest.mark.parametrize(
    "field", [{"model": "tiny"}, {"metadata": {"a": "b"}}, {"affinity_key": "me"}]
)
def test_what_never_changes_is_refused(
    door: Door, replica: PlayedReplica, field: dict[str, Any]
) -> None:
    answer = door.patch(door.submitted()["id"], **field)
    assert answer.status_code == 409
    assert error_of(answer)["code"] == "not_editable"
    assert error_of(answer)["param"] == next(iter(field))


def test_a_running_request_can_be_changed_in_a_little(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    claimed = replica.claim()
    refused = door.patch(request_id, guidance_scale=5, width=32)
    assert refused.status_code == 409
    assert error_of(refused)["code"] == "not_editable_while_running"
    assert error_of(refused)["param"] == "width"
    changed = door.patch(request_id, guidance_scale=5, timeout=12)
    assert changed.status_code == 200
    assert body_of(changed)["parameters"]["guidance_scale"] == 5
    assert body_of(changed)["timeout"] == 12
    signals = door.service.router.claims.progress(claimed, 1, 20, 0.1)
    assert signals is not None
    assert signals.revision == 1


def test_an_ended_request_stays_as_it_is(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    replica.succeed(replica.claim())
    answer = door.patch(request_id, seed=1)
    assert answer.status_code == 409
    assert error_of(answer)["code"] == "not_editable"
    assert door.patch("req_unknown", seed=1).status_code == 404


def test_edits_at_the_same_instant_all_count(door: Door, replica: PlayedReplica) -> None:
    """Two edits of different fields must not undo each other, whichever is written last."""
    request_id = door.submitted()["id"]
    gate = threading.Barrier(2)

    def edit(fields: dict[str, Any]) -> int:
        gate.wait(10)
        return door.patch(request_id, **fields).status_code

    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 11):
            edits = [{"seed": number}, {"num_inference_steps": number}]
            assert list(pool.map(edit, edits)) == [200, 200]
            parameters = body_of(door.get(f"/v1/requests/{request_id}"))["parameters"]
            assert (parameters["seed"], parameters["num_inference_steps"]) == (number, number)


# --- cancel and remove --------------------------------------------------------


def test_a_waiting_request_is_canceled_at_once(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    answer = door.post(f"/v1/requests/{request_id}/cancel")
    assert answer.status_code == 200
    assert body_of(answer)["status"] == "canceled"
    again = door.post(f"/v1/requests/{request_id}/cancel")
    assert (again.status_code, body_of(again)["status"]) == (200, "canceled")
    assert door.post("/v1/requests/req_unknown/cancel").status_code == 404


def test_a_running_request_is_told_to_stop(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    claimed = replica.claim()
    answer = door.post(f"/v1/requests/{request_id}/cancel")
    assert answer.status_code == 202
    assert body_of(answer)["status"] == "running"
    signals = door.service.router.claims.progress(claimed, 1, 20, 0.1)
    assert signals is not None
    assert signals.cancel
    replica.stop(claimed)
    assert body_of(door.get(f"/v1/requests/{request_id}"))["status"] == "canceled"


def test_delete_removes_record_and_files(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    replica.succeed(replica.claim())
    answer = door.delete(f"/v1/requests/{request_id}")
    assert (answer.status_code, answer.data) == (204, b"")
    assert door.get(f"/v1/requests/{request_id}").status_code == 404
    assert door.service.router.outputs.names(request_id) == []
    assert door.delete(f"/v1/requests/{request_id}").status_code == 404


def test_delete_of_a_running_request_stops_it(door: Door, replica: PlayedReplica) -> None:
    request_id = door.submitted()["id"]
    claimed = replica.claim()
    assert door.delete(f"/v1/requests/{request_id}").status_code == 204
    assert door.get(f"/v1/requests/{request_id}").status_code == 404
    signals = door.service.router.claims.progress(claimed, 1, 20, 0.1)
    assert signals is not None
    assert signals.cancel


def test_a_model_that_takes_no_guidance_is_asked_for_none(
    door: Door, replica: PlayedReplica
) -> None:
    bare = Abilities(**{**ABILITIES.to_json(), "guidance_scale": False, "negative_prompt": False})
    replica.load(replace(bare, default_guidance_scale=None))
    answer = door.submit(guidance_scale=3.0, negative_prompt="blurry")
    assert set(wrong_fields(answer)) == {"guidance_scale", "negative_prompt"}
    assert door.submitted()["parameters"]["guidance_scale"] is None
