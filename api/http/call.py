"""What every call passes on its way in and out, and what it may ask for in its headers.

A call has an id (`g.call_id`), the service behind it (`g.service`), and its patience with Redis.
It may ask to wait (`Prefer`), and to be safe against being sent twice (`Idempotency-Key`).
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

from flask import Flask, Response, g, request

from api.service import Service
from configs.errors import Forbidden, MalformedRequest
from routing.connection import API_PATIENCE_S, begin_patience, end_patience

CALL_ID_HEADER: Final = "X-Request-ID"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_MAX_KEY: Final = 255
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_WAIT: Final = re.compile(r'wait\s*=\s*"?(.*?)"?\Z', re.IGNORECASE)
_SECONDS: Final = re.compile(r"[0-9]{1,9}\Z")
PREFER_PARAMETER: Final = {
    "in": "header",
    "name": "Prefer",
    "schema": {"type": "string", "example": "wait=30"},
    "description": "wait=N holds the answer up to N seconds, until the request has ended.",
}


def key_parameter(more: str = "") -> dict[str, Any]:
    """Return what OpenAPI shows of the idempotency key; `more` ends the sentence."""
    return {
        "in": "header",
        "name": IDEMPOTENCY_KEY,
        "schema": {"type": "string", "maxLength": _MAX_KEY},
        "description": "A name of your own: the same one with the same body makes one request"
        f"{more}.",
    }


def register_call_hooks(app: Flask, service: Service) -> None:
    """Give every call of `app` its id, its patience and its service."""

    def begin() -> None:
        g.call_id = f"call_{secrets.token_hex(8)}"
        g.service = service
        begin_patience(API_PATIENCE_S)
        # A page anywhere may make its visitor's browser send a form here, with the key it has kept.
        if request.headers.get("Sec-Fetch-Site") == "cross-site" and request.method not in _SAFE:
            raise Forbidden(
                "Pages of other sites cannot send requests here.", param="Sec-Fetch-Site"
            )

    app.before_request(begin)
    app.after_request(_finish_headers)
    app.teardown_request(lambda _error: end_patience())


def _finish_headers(response: Response) -> Response:
    response.headers[CALL_ID_HEADER] = g.call_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


def idempotency_key() -> str:
    """Return the client's own name for the call at hand, empty for none.

    Raises:
        MalformedRequest: It is empty, longer than 255 characters, or not printable ASCII.
    """
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return ""
    if not (1 <= len(key) <= _MAX_KEY and key.isascii() and key.isprintable()):
        raise MalformedRequest(
            f"{IDEMPOTENCY_KEY} has 1 to {_MAX_KEY} printable ASCII characters.",
            param=IDEMPOTENCY_KEY,
        )
    return key


def preferred_wait(most_s: float) -> int:
    """Return how many seconds the client would wait (`Prefer: wait=N`), `most_s` at most.

    0 means that it would not. Other preferences are ignored, as RFC 7240 allows.

    Raises:
        MalformedRequest: N is not a whole number of seconds.
    """
    for preference in ",".join(request.headers.getlist("Prefer")).split(","):
        match = _WAIT.match(preference.split(";")[0].strip())
        if match is None:
            continue
        if not _SECONDS.match(match[1]):
            raise MalformedRequest(
                f"Prefer: wait={match[1][:20]} is not a whole number of seconds.", param="Prefer"
            )
        return min(int(match[1]), int(most_s))
    return 0
