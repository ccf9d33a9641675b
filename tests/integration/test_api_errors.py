"""What the API refuses whatever the fields: bodies, sizes, places; no replica; the unforeseen."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from configs.settings import Settings
from routing.replica import LoadedModel, ReplicaState
from tests.integration.api_world import (
    ABILITIES,
    Api,
    PlayedReplica,
    error_of,
    wrong_fields,
)
from tests.integration.conftest import ApiOpener


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"prompt=a",
        b"[]",
        b'"a"',
        b"null",
        b'{"prompt": "a", "guidance_scale": NaN}',
        b'{"prompt": "a", "guidance_scale": -Infinity}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"seed": ' + b"1" * 5000 + b"}",
        b"[" + b"{}," * 100_001 + b"0]",
        b"{" + b'"a":' * 100_001,
    ],
)
def test_a_body_that_cannot_be_read_is_malformed(
    api: Api, replica: PlayedReplica, body: bytes
) -> None:
    answer = api.client.post("/v1/requests", data=body, content_type="application/json")
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "malformed_request"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_another_content_type_is_malformed(
    api: Api, replica: PlayedReplica, content_type: str | None
) -> None:
    answer = api.client.post("/v1/requests", data=b'{"prompt":"a"}', content_type=content_type)
    assert answer.status_code == 400
    assert "application/json" in error_of(answer)["message"]


@pytest.mark.parametrize("form", [False, True])
def test_of_many_unknown_fields_the_first_are_told_and_all_are_counted(
    api: Api, replica: PlayedReplica, form: bool
) -> None:
    names = {f"{'width' * 40}{number}": 1 for number in range(900 if form else 20_000)}
    answer = api.client.post("/v1/requests", **({"data": names} if form else {"json": names}))
    error = error_of(answer)
    assert f"({len(names) + 1} errors; the first 20)" in error["message"]
    assert len(error["details"]) == 20
    assert len(answer.data) < 10_000


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ("a=1&" * 1001, "more than 1000 fields"),
        ("prompt=" + "%41" * 100_001, "more than 100000 characters as %XX"),
        ("seed=[" + "1,," * 40_000 + "&width=" + ",1" * 40_000, "more than 100000 commas"),
    ],
)
def test_a_form_of_too_many_parts_is_malformed(
    api: Api, replica: PlayedReplica, form: str, fault: str
) -> None:
    answer = api.client.post(
        "/v1/requests", data=form, content_type="application/x-www-form-urlencoded"
    )
    assert (answer.status_code, error_of(answer)["code"]) == (400, "malformed_request")
    assert fault in error_of(answer)["message"]


def test_a_body_that_is_too_large_is_413(api_settings: Settings, open_api: ApiOpener) -> None:
    api = open_api(replace(api_settings, max_body_bytes=2048))
    api.replica().load()
    answer = api.submit(prompt="x" * 3000)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "too_large"
    assert "2048" in error_of(answer)["message"]


def test_unknown_places_and_methods_answer_in_the_same_shape(api: Api) -> None:
    answer = api.get("/v1/nothing")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"
    answer = api.client.put("/v1/requests")
    assert answer.status_code == 405
    assert error_of(answer)["code"] == "method_not_allowed"
    assert {"GET", "POST"} <= set(answer.headers["Allow"].split(", "))
    for path in ("/v1/requests/req_unknown", "/v1/requests/req_unknown/outputs/0"):
        answer = api.get(path)
        assert answer.status_code == 404
        assert error_of(answer)["type"] == "invalid_request_error"


def test_a_full_line_is_429(api_settings: Settings, open_api: ApiOpener) -> None:
    api = open_api(replace(api_settings, max_waiting_per_replica=2))
    api.replica().load()
    for _ in range(2):
        api.submitted()
    answer = api.submit()
    assert answer.status_code == 429
    assert error_of(answer)["code"] == "queue_full"
    assert error_of(answer)["type"] == "rate_limit_error"
    assert int(answer.headers["Retry-After"]) >= 1


def test_no_ready_replica_is_503(api: Api) -> None:
    for expected in ("no replica has loaded", "no replica of"):
        answer = api.submit()
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "no_ready_replica"
        assert error_of(answer)["type"] == "server_error"
        assert expected in error_of(answer)["message"].lower()
        assert int(answer.headers["Retry-After"]) >= 1
        replica = api.replica()
        replica.load()
        replica.beat(ReplicaState.DRAINING)
    replica.beat(ReplicaState.FAILED, error="org/tiny: the model is gated")
    assert "replica0 is failed (org/tiny: the model is gated)" in error_of(api.submit())["message"]
    assert set(wrong_fields(api.submit(seed=-1))) == {"seed"}


def test_a_model_of_an_earlier_stage_file_is_not_served(api: Api, replica: PlayedReplica) -> None:
    """The registry keeps what was loaded once; only what the file names or somebody has counts."""
    registry = api.service.registry
    registry.publish_model(LoadedModel("former", 0, ABILITIES))
    assert set(wrong_fields(api.submit(model="former"))) == {"model"}
    elsewhere = api.replica("replica7")
    registry.publish_model(LoadedModel("elsewhere", 3, ABILITIES))
    elsewhere.beat(stage=3, model="elsewhere")
    assert api.submitted(model="elsewhere")["replica"] == "replica7"
    assert set(wrong_fields(api.submit())) == {"model"}


@pytest.fixture
def broken(api: Api) -> Api:
    """An API with one call that fails in a way nobody foresaw."""

    def divide() -> str:
        return str(1 / 0)

    api.app.add_url_rule("/broken", view_func=divide)
    return api


def test_a_500_carries_the_id_of_the_call_and_no_details(
    broken: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = broken.get("/broken")
    assert answer.status_code == 500
    error = error_of(answer)
    assert error["code"] == "internal_error"
    assert "division" not in answer.get_data(as_text=True)
    call_id = answer.headers["X-Request-ID"]
    assert call_id in error["message"]
    assert call_id in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert broken.get("/health").headers["X-Request-ID"] != call_id
