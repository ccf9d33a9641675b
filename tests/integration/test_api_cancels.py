"""Cancel and removal, as the API answers them."""

from __future__ import annotations

from tests.integration.api_world import (
    Api,
    PlayedReplica,
    body_of,
)


def test_a_waiting_request_is_canceled_at_once(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    answer = api.post(f"/v1/requests/{request_id}/cancel")
    assert answer.status_code == 200
    assert body_of(answer)["status"] == "canceled"
    again = api.post(f"/v1/requests/{request_id}/cancel")
    assert (again.status_code, body_of(again)["status"]) == (200, "canceled")
    assert api.post("/v1/requests/req_unknown/cancel").status_code == 404


def test_a_running_request_is_told_to_stop(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    claimed = replica.claim()
    answer = api.post(f"/v1/requests/{request_id}/cancel")
    assert answer.status_code == 202
    assert body_of(answer)["status"] == "running"
    signals = api.claims.progress(claimed, 1, 20, 0.1)
    assert signals is not None
    assert signals.cancel
    replica.stop(claimed)
    assert body_of(api.get(f"/v1/requests/{request_id}"))["status"] == "canceled"


def test_delete_removes_record_and_files(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    replica.succeed(replica.claim())
    answer = api.delete(f"/v1/requests/{request_id}")
    assert (answer.status_code, answer.data) == (204, b"")
    assert api.get(f"/v1/requests/{request_id}").status_code == 404
    assert api.service.outputs.names(request_id) == []
    assert api.delete(f"/v1/requests/{request_id}").status_code == 404


def test_delete_of_a_running_request_stops_it(api: Api, replica: PlayedReplica) -> None:
    request_id = api.submitted()["id"]
    claimed = replica.claim()
    assert api.delete(f"/v1/requests/{request_id}").status_code == 204
    assert api.get(f"/v1/requests/{request_id}").status_code == 404
    signals = api.claims.progress(claimed, 1, 20, 0.1)
    assert signals is not None
    assert signals.cancel
