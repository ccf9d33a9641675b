"""Access: one key for all calls but the probes, where `API_KEY` is set.

A program sends it as `Authorization: Bearer`; a browser asks its user for it and sends it as the
password of HTTP Basic, so that the page and its pictures need no code for it.
"""

from __future__ import annotations

import hmac
from typing import Final

from flask import Flask, Response, request

from configs.errors import Unauthorized

_OPEN: Final = frozenset({"/health", "/ready"})
_CHALLENGE: Final = 'Basic realm="Diffusion Replicas", charset="UTF-8"'


def register_access(app: Flask, key: str) -> None:
    """Ask every call of `app` for the key, if there is one."""
    if not key:
        return

    def check() -> None:
        if request.path in _OPEN or hmac.compare_digest(_given().encode(), key.encode()):
            return
        raise Unauthorized(
            "This service needs a key: send Authorization: Bearer <key>, or the key as the "
            "password of HTTP Basic.",
            param="Authorization",
        )

    app.before_request(check)
    app.after_request(_challenge)


def _given() -> str:
    authorization = request.authorization
    if authorization is None:
        return ""
    if authorization.type == "basic":
        return authorization.password or ""
    return authorization.token or "" if authorization.type == "bearer" else ""


def _challenge(response: Response) -> Response:
    if response.status_code == Unauthorized.status:
        response.headers["WWW-Authenticate"] = _CHALLENGE
    return response
