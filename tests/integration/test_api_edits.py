"""Edits: what may change of a request, and until when."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.api_world import (
    ABILITIES,
    Api,
    PlayedReplica,
    body_of,
    error_of,
    wrong_fields,
)
from workers.progress import RunningRequest


def test_a_waiting_request_can_be_changed_in_everything(api: Api, replica: PlayedReplica) -> None:
    api.submitted(priority="high")
    request = api.submitted(seed=5, timeout=30)
    assert request["queue_position"] == 2
    answer = api.patch(
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
    kept = body_of(api.patch(request["id"], seed=6))
    assert (kept["timeout"], kept["priority"]) == (60, "high")
    assert kept["start_by"] == changed["start_by"]


def test_null_in_an_edit_puts_the_default_back(api: Api, replica: PlayedReplica) -> None:
    request = api.submitted(
        output_format="jpeg", output_compression=50, width=32, timeout=5, negative_prompt="blur"
    )
    answer = api.patch(
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
    assert set(wrong_fields(api.patch(request["id"], prompt=None))) == {"prompt"}
    assert set(wrong_fields(api.patch(request["id"], expires_in=None))) == {"expires_in"}


def test_an_edit_is_checked_like_a_new_request(api: Api, replica: PlayedReplica) -> None:
    request = api.submitted(output_format="jpeg", output_compression=50)
    answer = api.patch(request["id"], width=65, num_inference_steps=0, stepz=1, output_format="png")
    assert set(wrong_fields(answer)) == {"stepz"}
    answer = api.patch(request["id"], width=65, num_inference_steps=0, output_format="png")
    assert set(wrong_fields(answer)) == {"width", "num_inference_steps", "output_compression"}
    assert body_of(api.get(f"/v1/requests/{request['id']}")) == request
    assert body_of(api.patch(request["id"])) == request


@pytest.mark.parametrize(
    "field", [{"model": "tiny"}, {"metadata": {"a": "b"}}, {"affinity_key": "me"}]
)
def test_what_never_changes_is_refused(
    api: Api, replica: PlayedReplica, field: dict[str, Any]
) -> None:
    answer = api.patch(api.submitted()["id"], **field)
    assert answer.status_code == 409
    assert error_of(answer)["code"] == "not_editable"
    assert error_of(answer)["param"] == next(iter(field))


def test_a_running_request_can_be_changed_in_a_little(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    claimed = replica.claim()
    refused = api.patch(request_id, guidance_scale=5, width=32)
    assert refused.status_code == 409
    assert error_of(refused)["code"] == "not_editable_while_running"
    assert error_of(refused)["param"] == "width"
    changed = api.patch(request_id, guidance_scale=5, timeout=12)
    assert changed.status_code == 200
    assert body_of(changed)["parameters"]["guidance_scale"] == 5
    assert body_of(changed)["timeout"] == 12
    signals = api.claims.progress(claimed, 1, 20, 0.1)
    assert signals is not None
    assert signals.revision == 1


def test_a_run_is_told_of_the_scales_that_changed(api: Api, replica: PlayedReplica) -> None:
    replica.load(replace(ABILITIES, true_cfg_scale=True))
    request_id = api.submitted(guidance_scale=4, true_cfg_scale=2)["id"]
    run = RunningRequest(replica.claim(), lambda: None)
    assert run.guidance() == {}
    for fields, told in (
        ({"timeout": 9}, {}),
        ({"true_cfg_scale": 6}, {"true_cfg_scale": 6}),
        ({"guidance_scale": 5}, {"guidance_scale": 5, "true_cfg_scale": 6}),
        ({"guidance_scale": 4}, {"guidance_scale": 4, "true_cfg_scale": 6}),
        ({"true_cfg_scale": None}, {"guidance_scale": 4, "true_cfg_scale": None}),
    ):
        assert api.patch(request_id, **fields).status_code == 200
        run.edit(api.service.records.get(request_id))
        assert run.guidance() == told


def test_an_ended_request_stays_as_it_is(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    replica.succeed(replica.claim())
    answer = api.patch(request_id, seed=1)
    assert answer.status_code == 409
    assert error_of(answer)["code"] == "not_editable"
    assert api.patch("req_unknown", seed=1).status_code == 404


def test_edits_at_the_same_instant_all_count(api: Api, replica: PlayedReplica) -> None:
    """Two edits of different fields must not undo each other, whichever is written last."""
    request_id = api.submitted()["id"]
    gate = threading.Barrier(2)

    def edit(fields: dict[str, Any]) -> int:
        gate.wait(10)
        return api.patch(request_id, **fields).status_code

    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 11):
            edits = [{"seed": number}, {"num_inference_steps": number}]
            assert list(pool.map(edit, edits)) == [200, 200]
            parameters = body_of(api.get(f"/v1/requests/{request_id}"))["parameters"]
            assert (parameters["seed"], parameters["num_inference_steps"]) == (number, number)
