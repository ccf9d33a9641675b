"""Error answers: their schema, and the only place that makes one."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from flask import Flask, Response, current_app, g, jsonify, request
from marshmallow import Schema, fields
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from werkzeug.exceptions import HTTPException

from api.http.fields import text
from configs.errors import (
    FieldError,
    GenerationError,
    InvalidRequest,
    MalformedRequest,
    NotFound,
    ServingError,
    StoreUnavailable,
    TooLarge,
)

_logger = logging.getLogger(__name__)


class FieldErrorSchema(Schema):
    """One wrong field."""

    param = text("Path of the field.")
    message = text("What is wrong, and how to fix it.")
    code = text("Stable word for programs.")


class ErrorSchema(Schema):
    """What went wrong."""

    message = text("For people.")
    type = text("`invalid_request_error`, `rate_limit_error` or `server_error`.")
    param = text("The field or header that is wrong.", allow_none=True)
    code = text("Stable word for programs.")
    details = fields.List(fields.Nested(FieldErrorSchema))


class ErrorAnswerSchema(Schema):
    """The one shape of all errors."""

    error = fields.Nested(ErrorSchema)


_STORE_RETRY_S: Final = 2.0
_FIRST_ERROR: Final = 400
_WRONG_METHOD: Final = 405
_TOO_MANY: Final = 429
_SERVER: Final = 500
_RETRIED: Final = frozenset({409, 429})


def register_error_handlers(app: Flask) -> None:
    """Answer every exception of the application's calls in the one shape."""
    app.register_error_handler(ServingError, _serving_error)
    app.register_error_handler(RedisError, _redis_error)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _unforeseen)


def error_object(error: Exception) -> dict[str, Any]:
    """Return what an answer that has begun already says of an error: what else had been its body.

    It is called while the call is at hand, and logs what an answer would have logged.
    """
    if isinstance(error, RedisError):
        response = _redis_error(error)
    elif isinstance(error, ServingError):
        response = _serving_error(error)
    else:
        response = _unforeseen(error)
    found: dict[str, Any] = response.get_json()["error"]
    return found


def _serving_error(error: ServingError) -> Response:
    if error.status == _SERVER and not isinstance(error, GenerationError):
        return _unforeseen(error)
    response = _answer(error.status, error.code, error.message, error.param, error.details)
    if error.status >= _SERVER or error.status in _RETRIED:
        # Clients of OpenAI's API repeat such calls by themselves, unless they are told not to.
        response.headers["X-Should-Retry"] = "true" if error.retryable else "false"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(math.ceil(error.retry_after))
    return response


def _redis_error(error: RedisError) -> Response:
    if isinstance(error, RedisConnectionError | RedisTimeoutError):
        _logger.warning("%s: Redis does not answer: %s", g.call_id, error)
    else:
        _logger.error("%s: Redis refused a command", g.call_id, exc_info=error)
    return _serving_error(
        StoreUnavailable(
            "The store of requests does not answer; try again in a few seconds. "
            "A submit with an Idempotency-Key may be sent again without running twice.",
            retry_after=_STORE_RETRY_S,
        )
    )


def _http_error(error: HTTPException) -> Response | HTTPException:
    """Answer what Flask, Werkzeug and webargs raise; redirects pass as they are."""
    status = error.code
    if status is None or status < _FIRST_ERROR:
        return error
    if status >= _SERVER:
        return _unforeseen(error)
    response = _serving_error(_translated(error)) if _is_ours(status) else _by_name(error, status)
    if allow := dict(error.get_headers()).get("Allow"):
        response.headers["Allow"] = allow
    return response


def _unforeseen(error: Exception) -> Response:
    _logger.error("%s: %s %s failed", g.call_id, request.method, request.path, exc_info=error)
    return _answer(
        _SERVER,
        ServingError.code,
        f"Something went wrong here, not with your request. The log has it under {g.call_id}.",
    )


def _is_ours(status: int) -> bool:
    return status in {
        kind.status for kind in (MalformedRequest, NotFound, TooLarge, InvalidRequest)
    }


def _translated(error: HTTPException) -> ServingError:
    match error.code:
        case NotFound.status:
            return NotFound(f"There is nothing at {request.path}; GET /docs lists the calls.")
        case TooLarge.status:
            limit = current_app.config["MAX_CONTENT_LENGTH"]
            return TooLarge(f"The body is too large; send {limit} bytes at most.")
        case InvalidRequest.status:
            return InvalidRequest.from_details(_query_errors(error), "The query is refused")
        case _:
            return MalformedRequest(error.description or "The call cannot be read.")


def _query_errors(error: HTTPException) -> list[FieldError]:
    """Read what webargs says of query parameters: location, then name, then reasons."""
    messages: Mapping[str, Mapping[str, list[str]]] = getattr(error, "data", {}).get("messages", {})
    return [
        FieldError(name, reason)
        for fields in messages.values()
        for name, reasons in fields.items()
        for reason in reasons
    ]


def _by_name(error: HTTPException, status: int) -> Response:
    message = error.description or error.name
    if status == _WRONG_METHOD:
        message = f"{request.method} is not a method of {request.path}."
    return _answer(status, error.name.lower().replace(" ", "_"), message)


def _answer(
    status: int,
    code: str,
    message: str,
    param: str | None = None,
    details: tuple[FieldError, ...] = (),
) -> Response:
    body: dict[str, Any] = {
        "message": message,
        "type": _type(status),
        "param": param,
        "code": code,
    }
    if details:
        body["details"] = [asdict(detail) for detail in details]
    response = jsonify({"error": body})
    response.status_code = status
    return response


def _type(status: int) -> str:
    if status >= _SERVER:
        return "server_error"
    return "rate_limit_error" if status == _TOO_MANY else "invalid_request_error"
