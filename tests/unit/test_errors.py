"""The tree of errors: what each shows to a client, and how several wrong fields become one text."""

from __future__ import annotations

import inspect

import pytest

from configs import errors
from configs.errors import ConfigurationError, FieldError, InvalidRequest, ServingError

TREE = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, ServingError)
]


def test_every_error_of_the_tree_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in TREE]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("kind", TREE)
def test_every_error_says_when_it_is_raised(kind: type[ServingError]) -> None:
    assert "aised" in (kind.__doc__ or "") or "ecorded" in (kind.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "status", "code", "retryable"),
    [
        ("ConfigurationError", 500, "configuration", False),
        ("MalformedRequest", 400, "malformed_request", False),
        ("InvalidRequest", 422, "invalid_parameter", False),
        ("NotFound", 404, "not_found", False),
        ("Conflict", 409, "conflict", False),
        ("NotEditableWhileRunning", 409, "not_editable_while_running", False),
        ("NotEditable", 409, "not_editable", False),
        ("IdempotencyMismatch", 409, "idempotency_key_reused", False),
        ("TooLarge", 413, "too_large", False),
        ("QueueFull", 429, "queue_full", True),
        ("Unavailable", 503, "unavailable", True),
        ("NoReadyReplica", 503, "no_ready_replica", True),
        ("StoreUnavailable", 503, "store_unavailable", True),
        ("ModelLoadFailed", 500, "model_load_failed", False),
        ("OutOfMemory", 500, "out_of_memory", False),
        ("GenerationFailed", 500, "generation_failed", False),
        ("LoraLoadFailed", 500, "lora_load_failed", False),
        ("OutputWriteFailed", 500, "output_write_failed", True),
        ("InputUnavailable", 500, "input_unavailable", False),
        ("NonFiniteOutput", 500, "non_finite_output", False),
        ("ReplicaCrashed", 500, "replica_crashed", True),
        ("DeviceLost", 500, "device_lost", True),
        ("TimedOut", 500, "timeout", False),
    ],
)
def test_public_face(name: str, status: int, code: str, retryable: bool) -> None:
    kind = getattr(errors, name)
    assert (kind.status, kind.code, kind.retryable) == (status, code, retryable)


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
