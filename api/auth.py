"""Access: one key for all calls but the probes, where `API_KEY` is set.

A program sends it as `Authorization: Bearer`; a browser asks its user for it and sends it as the
password of HTTP Basic, so that the page and its pictures need no code for it. Does not know what a
call does.
"""

from __future__ import annotations

import hmac
from typing import Final

from flask import Flask, Response, request

from api.service import service_of
from configs.errors import Forbidden, Unauthorized

_OPEN: Final = frozenset({"/health", "/ready"})


_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


_CHALLENGE: Final = 'Basic realm="Diffusion Replicas", charset="UTF-8"'


def register_access(app: Flask) -> None:
    """Ask every call of `app` for the key, if the settings have one."""
    app.before_request(_refuse_other_sites)
    key = service_of(app).settings.api_key
    if not key:
        return

    def check() -> None:
        if request.path in _OPEN or hmac.compare_digest(_given().encode(), key.encode()):
            return
        raise Unauthorized(
            "This service asks for a key: send Authorization: Bearer <key>, or the key as the "
            "password of HTTP Basic.",
            param="Authorization",
        )

    app.before_request(check)
    app.after_request(_challenge)


def _refuse_other_sites() -> None:
    """A page anywhere may make its visitor's browser send a form here, with the key it has kept."""
    if request.method not in _SAFE and request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise Forbidden("The page of another site may not do that.", param="Sec-Fetch-Site")


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
