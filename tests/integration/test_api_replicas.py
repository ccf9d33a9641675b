"""The calls for replicas and models, with played replicas."""

from __future__ import annotations

from routing.replica import ReplicaState
from tests.integration.api_world import Door, PlayedReplica, body_of, error_of


def test_replicas_are_listed_by_number_with_their_work(door: Door, replica: PlayedReplica) -> None:
    door.replica("replica10").load()
    door.replica("replica2").beat(ReplicaState.LOADING)
    replica.beat(step_s=0.25, memory_bytes=1000, devices=(4, 5))
    door.submitted()
    door.submitted()
    replica.claim()
    answer = door.get("/v1/replicas")
    assert answer.status_code == 200
    found = body_of(answer)
    assert found["object"] == "list"
    assert [one["name"] for one in found["data"]] == ["replica0", "replica2", "replica10"]
    assert [one["state"] for one in found["data"]] == ["ready", "loading", "ready"]
    first = found["data"][0]
    assert (first["running"], first["waiting"]) == (1, 0)
    assert first["devices"] == [4, 5]
    assert (first["seconds_per_step"], first["memory_bytes"]) == (0.25, 1000)
    assert first["device_memory_bytes"] is None
    assert first["model"] == "tiny"
    assert found["data"][2]["waiting"] == 1
    assert body_of(door.get("/v1/replicas/replica0")) == first


def test_a_replica_counts_what_it_did_and_how_often_it_came_back(
    door: Door, replica: PlayedReplica
) -> None:
    door.submitted()
    door.submitted()
    replica.succeed(replica.claim())
    replica.fail(replica.claim())
    door.replica("replica0").beat()
    shown = body_of(door.get("/v1/replicas/replica0"))
    assert (shown["completed"], shown["failed"], shown["restarts"]) == (1, 1, 1)


def test_an_unknown_replica_is_404(door: Door, replica: PlayedReplica) -> None:
    for answer in (
        door.get("/v1/replicas/replica9"),
        door.post("/v1/replicas/replica9/drain"),
        door.post("/v1/replicas/replica9/resume"),
    ):
        assert answer.status_code == 404
        assert "known are replica0" in error_of(answer)["message"]


def test_a_drained_replica_gets_nothing_until_it_is_resumed(
    door: Door, replica: PlayedReplica
) -> None:
    other = door.replica("replica1").load()
    running, waiting = door.submitted(), door.submitted()
    assert (running["replica"], waiting["replica"]) == (replica.name, other.name)
    replica.claim()
    moved = door.submitted()
    assert moved["replica"] == replica.name

    drained = door.post("/v1/replicas/replica0/drain")
    assert drained.status_code == 200
    assert body_of(drained)["state"] == "draining"
    assert (body_of(drained)["running"], body_of(drained)["waiting"]) == (1, 0)
    after = body_of(door.get(f"/v1/requests/{moved['id']}"))
    assert (after["replica"], after["attempt"]) == (other.name, 2)
    assert {door.submitted()["replica"] for _ in range(4)} == {other.name}
    assert body_of(door.post("/v1/replicas/replica0/drain"))["state"] == "draining"

    resumed = door.post("/v1/replicas/replica0/resume")
    assert (resumed.status_code, body_of(resumed)["state"]) == (200, "ready")
    assert {door.submitted()["replica"] for _ in range(4)} == {replica.name, other.name}


def test_models_are_listed_as_openai_does_with_what_they_can_do(door: Door) -> None:
    assert body_of(door.get("/v1/models")) == {"object": "list", "data": [], "has_more": False}
    replica = door.replica().load()
    (model,) = body_of(door.get("/v1/models"))["data"]
    assert (model["id"], model["object"], model["created"]) == ("tiny", "model", 1_800_000_000)
    assert model["ready_replicas"] == 1
    assert model["tasks"] == ["text-to-image"]
    assert model["size_multiple"] == 8
    assert model["limits"]["num_inference_steps"] == 1000
    assert model["limits"]["prompt_tokens"] == 77
    assert model["defaults"]["num_inference_steps"] == 20
    replica.beat(ReplicaState.DRAINING)
    (model,) = body_of(door.get("/v1/models"))["data"]
    assert model["ready_replicas"] == 0
