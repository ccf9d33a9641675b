"""The playground: one page at `/` that talks to the calls as any other client does.

The page needs no file from another host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from flask import Blueprint, Response, send_from_directory

_HERE: Final = Path(__file__).parent
_FILES: Final = "'page.js', 'inputs.js', 'requests.js', 'card.js', 'calls.js', 'page.css'"
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)

blueprint = Blueprint("page", __name__)


@blueprint.get("/")
def show() -> Response:
    """Return the page."""
    response = send_from_directory(_HERE, "index.html")
    response.headers["Content-Security-Policy"] = _POLICY
    return response


@blueprint.get(f"/page/<any({_FILES}):name>")
def file(name: str) -> Response:
    """Return a file of the page."""
    return send_from_directory(_HERE, name)
