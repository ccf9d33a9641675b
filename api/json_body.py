"""A JSON body, read strictly: what other readers might take differently is refused as malformed.

That is NaN and Infinity, a name that stands twice, text that is not Unicode. Does not know what the
fields mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from flask import request

from configs.errors import MalformedRequest

JSON: Final = "application/json"


def read_json_object() -> dict[str, Any]:
    """Return the JSON object that the call at hand carries.

    Raises:
        MalformedRequest: It carries none, or one that can not be read.
        werkzeug.exceptions.RequestEntityTooLarge: It is larger than a body may be.
    """
    if request.mimetype != JSON:
        found = request.mimetype or "none"
        raise MalformedRequest(
            f"The content type is {found[:80]}; send JSON, with Content-Type: {JSON}."
        )
    try:
        value = parse_json(request.get_data(cache=False).decode())
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise MalformedRequest(f"The body is not JSON that can be read: {reason}.") from None
    if not isinstance(value, dict):
        raise MalformedRequest("The body is JSON and not an object; send one such as {...}.")
    return value


def parse_json(text: str) -> Any:
    """Return the value that a JSON text says.

    Raises:
        ValueError: It is none, or one that other readers might take differently.
        RecursionError: It is nested too deep.
    """
    value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct)
    _refuse_surrogates(value)
    return value


def fingerprint(body: dict[str, Any]) -> str:
    """Return a hash that two bodies share only when they say the same, whatever their spacing."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), default=_digest)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _digest(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} stands twice in one object")
        found[name] = value
    return found


def _refuse_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no text") from None
