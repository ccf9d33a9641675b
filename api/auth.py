"""Access: one key for all calls but the probes, where `API_KEY` is set.

A program sends it as `Authorization: Bearer`; a browser asks its user for it and sends it as the
password of HTTP Basic, so that the page and its pictures need no code for it. An address that an
answer names may be signed instead: it opens that one file, without the key, until its end date.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Final

from flask import Flask, Response, request
from itsdangerous import Signer

from configs.errors import Unauthorized
from configs.settings import Settings

_OPEN: Final = frozenset({"/health", "/ready"})
_SIGNATURE: Final = "signature"
_EXPIRES: Final = "expires"
_READING: Final = frozenset({"GET", "HEAD"})
_CHALLENGE: Final = 'Basic realm="Diffusion Replicas", charset="UTF-8"'


def register_access(app: Flask, key: str) -> None:
    """Ask every call of `app` for the key, if there is one."""
    if not key:
        return

    def check() -> None:
        if request.path in _OPEN or hmac.compare_digest(_given().encode(), key.encode()):
            return
        if _SIGNATURE in request.args and request.method in _READING:
            _check_signature(key)
            return
        raise Unauthorized(
            "This service needs a key: send Authorization: Bearer <key>, or the key as the "
            "password of HTTP Basic.",
            param="Authorization",
        )

    app.before_request(check)
    app.after_request(_challenge)


def signed(path: str, settings: Settings) -> str:
    """Return a path that opens without the key for `signed_url_s`; without a key it stays as it is.

    The signature covers the path and its end date, by a key that is derived from `api_key`.
    """
    if not settings.api_key:
        return path
    expires = str(int(time.time() + settings.signed_url_s))
    signature = _signer(settings.api_key).get_signature(_covered(path, expires)).decode()
    return f"{path}?{_EXPIRES}={expires}&{_SIGNATURE}={signature}"


def _check_signature(key: str) -> None:
    """Refuse the call at hand unless its signature is right and its end date has not passed."""
    expires = request.args.get(_EXPIRES, "")
    covered = _covered(request.path, expires)
    if not _signer(key).verify_signature(covered, request.args[_SIGNATURE]):
        raise Unauthorized(
            "The signature does not belong to this address; use the address as it was answered, "
            "or send the key.",
            param=_SIGNATURE,
        )
    if int(expires) < time.time():  # a number, since we have signed it
        raise Unauthorized(
            "This address has expired; send the key, or make the request again.", param=_EXPIRES
        )


def _signer(key: str) -> Signer:
    return Signer(key, salt="diffusion-replicas.files", digest_method=hashlib.sha256)


def _covered(path: str, expires: str) -> str:
    return f"{path}?{_EXPIRES}={expires}"


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
