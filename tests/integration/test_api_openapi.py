"""The spec at /openapi.json says what the calls do."""

from __future__ import annotations

from typing import Any

import pytest
from werkzeug.test import TestResponse

from routing.replica import ReplicaState
from tests.integration.api_world import Api, PlayedReplica, body_of
from tests.integration.spec import Spec

CALLS = {
    ("post", "/v1/requests"),
    ("get", "/v1/requests"),
    ("get", "/v1/requests/{request_id}"),
    ("get", "/v1/requests/{request_id}/events"),
    ("patch", "/v1/requests/{request_id}"),
    ("delete", "/v1/requests/{request_id}"),
    ("post", "/v1/requests/{request_id}/cancel"),
    ("get", "/v1/requests/{request_id}/inputs/{index}"),
    ("get", "/v1/requests/{request_id}/outputs/{index}"),
    ("get", "/v1/replicas"),
    ("get", "/v1/replicas/{name}"),
    ("post", "/v1/replicas/{name}/drain"),
    ("post", "/v1/replicas/{name}/resume"),
    ("post", "/v1/replicas/{name}/restart"),
    ("post", "/v1/images/generations"),
    ("post", "/v1/images/edits"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/videos"),
    ("get", "/v1/videos"),
    ("get", "/v1/videos/{request_id}"),
    ("get", "/v1/videos/{request_id}/content"),
    ("delete", "/v1/videos/{request_id}"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{name}"),
    ("get", "/health"),
    ("get", "/ready"),
}


@pytest.fixture
def spec(api: Api) -> Spec:
    answer = api.get("/openapi.json")
    assert answer.status_code == 200
    return Spec(body_of(answer))


def test_every_call_is_in_the_spec_with_a_summary(spec: Spec) -> None:
    found = {
        (method, path): call
        for path, calls in spec.document["paths"].items()
        for method, call in calls.items()
        if method != "parameters"
    }
    assert set(found) == CALLS
    assert all(call["summary"] for call in found.values())
    assert all("default" in call["responses"] for call in found.values())


def test_the_body_is_described_with_types_and_defaults(spec: Spec) -> None:
    body = spec.document["components"]["schemas"]["RequestBody"]
    assert body["required"] == ["prompt"]
    properties = body["properties"]
    assert properties["seed"]["type"] == "integer"
    assert properties["guidance_scale"]["type"] == "number"
    assert properties["priority"]["enum"] == ["high", "normal", "low"]
    assert all(one.get("description") for one in properties.values())
    submit = spec.document["paths"]["/v1/requests"]["post"]
    assert {one["name"] for one in submit["parameters"]} == {"Prefer", "Idempotency-Key"}
    assert submit["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/RequestBody"
    }


def test_answers_are_as_the_spec_says(api: Api, replica: PlayedReplica, spec: Spec) -> None:
    def check(answer: TestResponse, method: str, path: str, status: int) -> dict[str, Any]:
        assert answer.status_code == status, answer.get_data(as_text=True)
        schema = spec.answer_schema(method, path, status)
        assert schema is not None, f"{method} {path} {status} has no schema"
        assert list(spec.differences(body_of(answer), schema)) == []
        return body_of(answer)

    one = "/v1/requests/{request_id}"
    first = check(api.submit(metadata={"a": "b"}), "post", "/v1/requests", 202)
    check(api.submit(width=63), "post", "/v1/requests", 422)
    check(api.get(f"/v1/requests/{first['id']}"), "get", one, 200)
    check(api.patch(first["id"], seed=1, timeout=5, expires_in=99), "patch", one, 200)
    claimed = replica.claim()
    api.claims.progress(claimed, 1, 20, 0.1)
    check(api.get(f"/v1/requests/{first['id']}"), "get", one, 200)
    check(api.post(f"/v1/requests/{first['id']}/cancel"), "post", f"{one}/cancel", 202)
    replica.succeed(claimed)
    check(api.post(f"/v1/requests/{first['id']}/cancel"), "post", f"{one}/cancel", 200)
    api.submitted()
    replica.fail(replica.claim())
    listed = check(api.get("/v1/requests"), "get", "/v1/requests", 200)
    assert [request["status"] for request in listed["data"]] == ["failed", "canceled"]
    check(api.get("/v1/replicas"), "get", "/v1/replicas", 200)
    check(api.get("/v1/replicas/replica0"), "get", "/v1/replicas/{name}", 200)
    check(api.post("/v1/replicas/replica0/drain"), "post", "/v1/replicas/{name}/drain", 200)
    check(api.post("/v1/replicas/replica0/restart"), "post", "/v1/replicas/{name}/restart", 202)
    check(api.get("/ready"), "get", "/ready", 503)
    check(api.post("/v1/replicas/replica0/resume"), "post", "/v1/replicas/{name}/resume", 200)
    check(api.get("/v1/models"), "get", "/v1/models", 200)
    check(api.get("/ready"), "get", "/ready", 200)
    check(api.get("/health"), "get", "/health", 200)
    check(api.get("/v1/replicas/nobody"), "get", "/v1/replicas/{name}", 404)
    replica.beat(ReplicaState.FAILED, error="no memory", device_memory_bytes=5, step_s=0.5)
    check(api.get("/v1/replicas"), "get", "/v1/replicas", 200)
