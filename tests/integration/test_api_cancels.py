"""Cancel and removal, as the door answers them."""

from __future__ import annotations

from tests.integration.api_world import (
    Door,
    PlayedReplica,
    body_of,
)


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
