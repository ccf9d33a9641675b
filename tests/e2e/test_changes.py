"""Cancel, edit and remove reach exactly the replica that has the request, and no neighbour."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.lab.tiny_model.picture_check import check_picture
from tests.e2e.service import Service
from tests.waiting import wait_until

LONG = 900  # steps: some seconds on the bundled model


@pytest.fixture
def busy(service: Service):
    """A long request that keeps replica0 at work; canceled at the end."""
    request = service.submit_to("replica0", "a red circle", num_inference_steps=LONG, seed=1)
    service.at_step(request["id"], 1)
    yield request
    service.call("POST", f"/v1/requests/{request['id']}/cancel")
    service.ended(request["id"])


def test_progress_moves_while_it_runs(service: Service, busy: dict[str, Any]) -> None:
    early = service.at_step(busy["id"], 10)
    late = service.at_step(busy["id"], early["progress"]["step"] + 20)
    assert early["status"] == late["status"] == "running"
    assert late["progress"]["steps"] == LONG
    assert 0 < late["progress"]["fraction"] < 1
    assert late["progress"]["eta_s"] > 0


def test_cancel_ends_a_running_request_before_its_last_step(
    service: Service, busy: dict[str, Any]
) -> None:
    service.at_step(busy["id"], 20)
    answer = service.call("POST", f"/v1/requests/{busy['id']}/cancel")
    assert answer.status == 202
    ended = service.ended(busy["id"])
    assert ended["status"] == "canceled"
    assert ended["outputs"] == []
    assert ended["timings"]["decode_s"] is None
    assert service.files(busy["id"]) == []
    assert ended["progress"]["step"] < LONG
    again = service.call("POST", f"/v1/requests/{busy['id']}/cancel")
    assert (again.status, again.json["status"]) == (200, "canceled")


def test_cancel_of_a_waiting_request_leaves_the_running_one_alone(service: Service) -> None:
    alone = service.submit_to("replica0", "a blue star", num_inference_steps=100, seed=9)
    reference = service.output(service.ended(alone["id"])).content
    running = service.submit_to("replica0", "a blue star", num_inference_steps=100, seed=9)
    waiting = service.submit_to("replica0", "a red circle", seed=9)
    service.at_step(running["id"], 1)
    assert service.get(waiting["id"])["queue_position"] == 1
    answer = service.call("POST", f"/v1/requests/{waiting['id']}/cancel")
    assert (answer.status, answer.json["status"]) == (200, "canceled")
    assert answer.json["started_at"] is None
    assert service.output(service.ended(running["id"])).content == reference
    assert service.files(waiting["id"]) == []


def test_an_edited_prompt_is_what_the_picture_shows(service: Service, busy: dict[str, Any]) -> None:
    waiting = service.submit_to("replica0", "a red circle on a blue background", seed=2)
    answer = service.call(
        "PATCH", f"/v1/requests/{waiting['id']}", {"prompt": "a green square on a white background"}
    )
    assert answer.status == 200, answer.content
    service.call("POST", f"/v1/requests/{busy['id']}/cancel")
    ended = service.ended(waiting["id"])
    assert ended["parameters"]["prompt"] == "a green square on a white background"
    picture = service.output(ended).image
    assert check_picture(picture, "a green square on a white background").ok
    late = service.call("PATCH", f"/v1/requests/{waiting['id']}", {"prompt": "too late"})
    assert late.status == 409


def test_guidance_of_a_running_request_can_be_changed_and_its_prompt_not(service: Service) -> None:
    fields = {"num_inference_steps": 120, "seed": 4, "guidance_scale": 3.0}
    reference = service.ended(service.submit("a red heart on a black background", **fields)["id"])
    request = service.submit("a red heart on a black background", **fields)
    service.at_step(request["id"], 1)
    url = f"/v1/requests/{request['id']}"
    refused = service.call("PATCH", url, {"prompt": "a cat"})
    assert refused.status == 409
    assert refused.json["error"]["code"] == "not_editable_while_running"
    assert service.call("PATCH", url, {"guidance_scale": 7.5}).status == 200
    ended = service.ended(request["id"])
    assert ended["parameters"]["guidance_scale"] == 7.5
    assert service.output(ended).content != service.output(reference).content


def test_a_timeout_ends_a_run_at_a_step(service: Service) -> None:
    request = service.submit(num_inference_steps=LONG, timeout=0.5)
    ended = service.ended(request["id"])
    assert (ended["status"], ended["error"]["code"]) == ("failed", "timeout")
    assert 0 < ended["progress"]["step"] < LONG


def test_remove_of_a_running_request_leaves_neither_record_nor_file(service: Service) -> None:
    request = service.submit(num_inference_steps=LONG)
    service.at_step(request["id"], 1)
    assert service.call("DELETE", f"/v1/requests/{request['id']}").status == 204
    assert service.call("GET", f"/v1/requests/{request['id']}").status == 404
    replica = request["replica"]
    wait_until(
        lambda: service.call("GET", f"/v1/replicas/{replica}").json["running"] == 0, 10, "the end"
    )
    assert service.files(request["id"]) == []


def test_an_unknown_id_is_404_on_every_call(service: Service) -> None:
    for method, path in (
        ("GET", ""),
        ("PATCH", ""),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("GET", "/outputs/0"),
    ):
        body = {"prompt": "x"} if method == "PATCH" else None
        answer = service.call(method, f"/v1/requests/req_nobody{path}", body)
        assert answer.status == 404, (method, path, answer.content)
        assert "req_nobody" in answer.json["error"]["message"]


def test_twenty_bad_submits_at_once_are_refused_and_a_good_one_then_works(service: Service) -> None:
    bad = [{"prompt": "a cat", "num_inference_steps": -k, "width": 63} for k in range(20)]
    answers = service.submit_all(bad)
    assert {answer.status for answer in answers} == {422}
    named = {detail["param"] for detail in answers[0].json["error"]["details"]}
    assert named == {"num_inference_steps", "width"}
    assert service.ended(service.submit()["id"])["status"] == "succeeded"
