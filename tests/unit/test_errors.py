"""The tree of errors: what each shows to a client, and how several wrong fields become one text."""

from __future__ import annotations

import pytest
from flask import Flask, g
from flask.testing import FlaskClient

from api.errors import register_error_handlers
from configs import errors
from configs.errors import ConfigurationError, FieldError, InvalidRequest


@pytest.fixture(scope="module")
def client() -> FlaskClient:
    """An application whose calls raise the error that they name."""
    app = Flask(__name__)
    register_error_handlers(app)

    @app.get("/<name>")
    def fail(name: str) -> str:
        g.call_id = "call_1"
        raise getattr(errors, name)("why")

    return app.test_client()


@pytest.mark.parametrize(
    ("name", "status", "code", "again"),
    [
        ("MalformedRequest", 400, "malformed_request", None),
        ("InvalidRequest", 422, "invalid_parameter", None),
        ("NotFound", 404, "not_found", None),
        ("Conflict", 409, "conflict", "false"),
        ("NotEditableWhileRunning", 409, "not_editable_while_running", "false"),
        ("NotEditable", 409, "not_editable", "false"),
        ("IdempotencyMismatch", 409, "idempotency_key_reused", "false"),
        ("TooLarge", 413, "too_large", None),
        ("QueueFull", 429, "queue_full", "true"),
        ("Unavailable", 503, "unavailable", "true"),
        ("NoReadyReplica", 503, "no_ready_replica", "true"),
        ("StoreUnavailable", 503, "store_unavailable", "true"),
        ("ModelLoadFailed", 500, "model_load_failed", "false"),
        ("OutOfMemory", 500, "out_of_memory", "false"),
        ("GenerationFailed", 500, "generation_failed", "false"),
        ("LoraLoadFailed", 500, "lora_load_failed", "false"),
        ("OutputWriteFailed", 500, "output_write_failed", "true"),
        ("InputUnavailable", 500, "input_unavailable", "false"),
        ("NonFiniteOutput", 500, "non_finite_output", "false"),
        ("ReplicaCrashed", 500, "replica_crashed", "false"),
        ("DeviceLost", 500, "device_lost", "true"),
        ("TimedOut", 500, "timeout", "false"),
    ],
)
def test_what_a_client_is_answered(
    client: FlaskClient, name: str, status: int, code: str, again: str | None
) -> None:
    answer = client.get(f"/{name}")
    assert answer.status_code == status
    assert (answer.json or {})["error"]["code"] == code
    assert (answer.json or {})["error"]["message"] == "why"
    assert answer.headers.get("X-Should-Retry") == again


def test_several_wrong_fields_are_one_text_with_a_line_for_each() -> None:
    details = [FieldError("width", "7 is too small"), FieldError("seed", "-1 is negative")]
    error = InvalidRequest.from_details(details, "the request is refused")
    assert isinstance(error, InvalidRequest)
    assert str(error) == (
        "the request is refused (2 errors)\n  - width: 7 is too small\n  - seed: -1 is negative"
    )
    assert error.details == tuple(details)
    assert error.param is None


def test_a_single_wrong_field_is_the_param() -> None:
    error = ConfigurationError.from_details([FieldError("API_PORT", "'x' is no port")], "refused")
    assert str(error) == "refused: API_PORT: 'x' is no port"
    assert error.param == "API_PORT"


def test_a_named_param_is_kept() -> None:
    error = InvalidRequest("no", param="size", details=[FieldError("width", "7")], retry_after=2.5)
    assert error.param == "size"
    assert error.retry_after == 2.5
