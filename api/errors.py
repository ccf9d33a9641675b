"""Error answers: their schema, and the only place that makes one."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flask import Flask, Response, current_app, g, jsonify, request
from marshmallow import missing
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from werkzeug.exceptions import HTTPException

from api.http.fields import AnswerSchema, always, nested, text
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


_STORE_RETRY_S: Final = 2.0
_FIRST_ERROR: Final = 400
_WRONG_METHOD: Final = 405
_TOO_MANY: Final = 429
_SERVER: Final = 500
_RETRIED: Final = frozenset({409, 429})


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What a client is told of an error: the parts of the body, the status and the headers."""

    status: int
    code: str
    message: str
    param: str | None = None
    details: tuple[FieldError, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        """The word of OpenAI's API for errors of this status."""
        if self.status >= _SERVER:
            return "server_error"
        return "rate_limit_error" if self.status == _TOO_MANY else "invalid_request_error"


class FieldErrorSchema(AnswerSchema):
    """One wrong field."""

    param = text("Path of the field.")
    message = text("What is wrong, and how to fix it.")
    code = text("Stable word for programs.")


class ErrorSchema(AnswerSchema):
    """What went wrong."""

    message = text("For people.")
    type = text("`invalid_request_error`, `rate_limit_error` or `server_error`.")
    param = text("The field or header that is wrong.", allow_none=True)
    code = text("Stable word for programs.")
    details = nested(FieldErrorSchema, lambda told: told.details or missing, many=True)


class ErrorAnswerSchema(AnswerSchema):
    """The one shape of all errors."""

    error = nested(ErrorSchema, lambda told: told)


class ErrorEventSchema(AnswerSchema):
    """An error as the last event of a stream."""

    type = always("error")
    error = nested(ErrorSchema, lambda told: told)


_ANSWER: Final = ErrorAnswerSchema()
_EVENT: Final = ErrorEventSchema()


def register_error_handlers(app: Flask) -> None:
    """Answer every exception of the application's calls in the one shape."""
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, lambda error: _response(_told(error)))


def error_event(error: Exception) -> dict[str, Any]:
    """Return what the stream of an answer that has begun already says of an error.

    It is called while the call is at hand, and logs what an answer would have logged.
    """
    event: dict[str, Any] = _EVENT.dump(_told(error))
    return event


def _told(error: Exception) -> ErrorAnswer:
    if isinstance(error, RedisError):
        return _redis_error(error)
    return _serving_error(error) if isinstance(error, ServingError) else _unforeseen(error)


def _response(told: ErrorAnswer) -> Response:
    response = jsonify(_ANSWER.dump(told))
    response.status_code = told.status
    response.headers.update(told.headers)
    return response


def _serving_error(error: ServingError) -> ErrorAnswer:
    if error.status == _SERVER and not isinstance(error, GenerationError):
        return _unforeseen(error)
    headers = {}
    if error.status >= _SERVER or error.status in _RETRIED:
        # Clients of OpenAI's API repeat such calls by themselves, unless they are told not to.
        headers["X-Should-Retry"] = "true" if error.retryable else "false"
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    details = error.details[: error.most_details]
    return ErrorAnswer(error.status, error.code, error.message, error.param, details, headers)


def _redis_error(error: RedisError) -> ErrorAnswer:
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
        return _response(_unforeseen(error))
    told = _serving_error(_translated(error)) if _is_ours(status) else _by_name(error, status)
    response = _response(told)
    if allow := dict(error.get_headers()).get("Allow"):
        response.headers["Allow"] = allow
    return response


def _unforeseen(error: Exception) -> ErrorAnswer:
    _logger.error("%s: %s %s failed", g.call_id, request.method, request.path, exc_info=error)
    return ErrorAnswer(
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


def _by_name(error: HTTPException, status: int) -> ErrorAnswer:
    message = error.description or error.name
    if status == _WRONG_METHOD:
        message = f"{request.method} is not a method of {request.path}."
    return ErrorAnswer(status, error.name.lower().replace(" ", "_"), message)
