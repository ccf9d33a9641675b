"""The docs page: Swagger UI over `/openapi.json`, with every file from this process."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import flask_swagger_ui
from flask import Blueprint, Response, send_from_directory

_HERE: Final = Path(__file__).parent
_SWAGGER_UI: Final = Path(flask_swagger_ui.__file__).parent / "dist"
# Swagger UI writes styles into its elements and carries its icons as data URLs.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)

blueprint = Blueprint("docs", __name__)


@blueprint.get("/docs")
def show() -> Response:
    """Return the page."""
    response = send_from_directory(_HERE, "index.html")
    response.headers["Content-Security-Policy"] = _POLICY
    return response


@blueprint.get("/docs/start.js")
def start() -> Response:
    """Return the script that opens our spec in Swagger UI."""
    return send_from_directory(_HERE, "start.js")


@blueprint.get("/docs/<path:name>")
def file(name: str) -> Response:
    """Return a file of Swagger UI."""
    return send_from_directory(_SWAGGER_UI, name)
