"""The calls for replicas and models, with played replicas."""

from __future__ import annotations

from routing.replica import ReplicaState
from tests.integration.api_world import Api, PlayedReplica, body_of, error_of, wrong_fields


def test_replicas_are_listed_by_number_with_their_work(api: Api, replica: PlayedReplica) -> None:
    api.replica("replica10").load()
    api.replica("replica2").beat(ReplicaState.LOADING)
    replica.beat(step_s=0.25, memory_bytes=1000, devices=(4, 5))
    api.submitted()
    api.submitted()
    replica.claim()
    answer = api.get("/v1/replicas")
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
    assert body_of(api.get("/v1/replicas/replica0")) == first


def test_a_replica_counts_what_it_did_and_how_often_it_came_back(
    api: Api, replica: PlayedReplica
) -> None:
    api.submitted()
    api.submitted()
    replica.succeed(replica.claim())
    replica.fail(replica.claim())
    api.replica("replica0").beat()
    shown = body_of(api.get("/v1/replicas/replica0"))
    assert (shown["completed"], shown["failed"], shown["restarts"]) == (1, 1, 1)


def test_what_a_replica_does_while_it_loads_is_shown_to_whoever_asks_for_it(api: Api) -> None:
    loading = api.replica()
    loading.beat(
        ReplicaState.LOADING,
        activity="downloading 14.2 of 57.7 GB",
        downloaded_bytes=14_200_000_000,
        download_bytes=57_700_000_000,
    )
    shown = body_of(api.get("/v1/replicas/replica0"))
    assert shown["activity"] == "downloading 14.2 of 57.7 GB"
    assert (shown["downloaded_bytes"], shown["download_bytes"]) == (14_200_000_000, 57_700_000_000)
    message = error_of(api.submit())["message"]
    assert "replica0 is loading (downloading 14.2 of 57.7 GB)" in message
    loading.load()
    shown = body_of(api.get("/v1/replicas/replica0"))
    assert {shown[name] for name in ("activity", "downloaded_bytes", "download_bytes")} == {None}


def test_an_unknown_replica_is_404(api: Api, replica: PlayedReplica) -> None:
    for answer in (
        api.get("/v1/replicas/replica9"),
        api.post("/v1/replicas/replica9/drain"),
        api.post("/v1/replicas/replica9/resume"),
        api.post("/v1/replicas/replica9/restart"),
    ):
        assert answer.status_code == 404
        assert "use one of replica0" in error_of(answer)["message"]


def test_a_drained_replica_gets_nothing_until_it_is_resumed(
    api: Api, replica: PlayedReplica
) -> None:
    other = api.replica("replica1").load()
    running, waiting = api.submitted(), api.submitted()
    assert (running["replica"], waiting["replica"]) == (replica.name, other.name)
    replica.claim()
    moved = api.submitted()
    assert moved["replica"] == replica.name

    drained = api.post("/v1/replicas/replica0/drain")
    assert drained.status_code == 200
    assert body_of(drained)["state"] == "draining"
    assert (body_of(drained)["running"], body_of(drained)["waiting"]) == (1, 0)
    after = body_of(api.get(f"/v1/requests/{moved['id']}"))
    assert (after["replica"], after["attempt"]) == (other.name, 2)
    assert {api.submitted()["replica"] for _ in range(4)} == {other.name}
    assert body_of(api.post("/v1/replicas/replica0/drain"))["state"] == "draining"

    resumed = api.post("/v1/replicas/replica0/resume")
    assert (resumed.status_code, body_of(resumed)["state"]) == (200, "ready")
    assert {api.submitted()["replica"] for _ in range(4)} == {replica.name, other.name}


def test_a_restart_takes_one_process_out_and_the_next_one_joins(
    api: Api, replica: PlayedReplica
) -> None:
    other = api.replica("replica1").load()
    waiting = api.submitted()
    asked = api.post("/v1/replicas/replica0/restart?drain_s=90")
    assert (asked.status_code, body_of(asked)["state"]) == (202, "draining")
    assert body_of(api.get(f"/v1/requests/{waiting['id']}"))["replica"] == other.name
    command = replica.beat().drain
    assert command is not None
    assert (command.seconds, command.ends) == (90.0, True)
    assert {api.submitted()["replica"] for _ in range(3)} == {other.name}
    replica.beat(ReplicaState.DRAINING, stopping=True)
    replica.beat(ReplicaState.GONE)
    after = api.replica("replica0")
    assert after.beat(ReplicaState.LOADING).drain is None
    assert after.beat().state is ReplicaState.READY
    assert {api.submitted()["replica"] for _ in range(2)} == {replica.name, other.name}


def test_a_drained_replica_stays_drained_over_a_restart(api: Api, replica: PlayedReplica) -> None:
    api.post("/v1/replicas/replica0/drain")
    first = replica.beat().drain
    assert first is not None
    assert not first.ends
    assert first.seconds == api.service.settings.drain_s
    api.post("/v1/replicas/replica0/restart")
    after = api.replica("replica0")
    assert after.beat().state is ReplicaState.DRAINING
    api.post("/v1/replicas/replica0/resume")
    standing = after.beat()
    assert (standing.state, standing.drain) == (ReplicaState.READY, None)


def test_a_restart_that_is_called_off_before_it_was_heard_is_none(
    api: Api, replica: PlayedReplica
) -> None:
    api.post("/v1/replicas/replica0/restart")
    assert body_of(api.post("/v1/replicas/replica0/resume"))["state"] == "ready"
    assert replica.beat().drain is None


def test_what_has_no_process_cannot_be_restarted(api: Api, replica: PlayedReplica) -> None:
    for state in (ReplicaState.LOADING, ReplicaState.FAILED, ReplicaState.GONE):
        replica.beat(state)
        refused = api.post("/v1/replicas/replica0/restart")
        assert refused.status_code == 409
        assert f"replica0 is {state}" in error_of(refused)["message"]


def test_a_drain_time_that_is_no_time_is_refused(api: Api, replica: PlayedReplica) -> None:
    for given in ("-1", "soon", "nan", "90000"):
        for call in ("drain", "restart"):
            answer = api.post(f"/v1/replicas/replica0/{call}?drain_s={given}")
            assert "drain_s" in wrong_fields(answer)
    assert "drain" in wrong_fields(api.post("/v1/replicas/replica0/drain?drain=1"))
    assert body_of(api.get("/v1/replicas/replica0"))["state"] == "ready"


def test_models_are_listed_as_openai_does_with_what_they_can_do(api: Api) -> None:
    assert body_of(api.get("/v1/models")) == {"object": "list", "data": [], "has_more": False}
    replica = api.replica().load()
    (model,) = body_of(api.get("/v1/models"))["data"]
    assert (model["id"], model["object"], model["created"]) == ("tiny", "model", 1_800_000_000)
    assert model["ready_replicas"] == 1
    assert model["tasks"] == ["text-to-image"]
    assert model["size_multiple"] == 8
    assert model["limits"]["num_inference_steps"] == 1000
    assert model["limits"]["prompt_tokens"] == 77
    assert model["defaults"]["num_inference_steps"] == 20
    replica.beat(ReplicaState.DRAINING)
    (model,) = body_of(api.get("/v1/models"))["data"]
    assert model["ready_replicas"] == 0
