"""The body of a call, as JSON or as a form, read strictly."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from flask import request
from marshmallow import Schema, fields

from configs.errors import MalformedRequest

JSON: Final = "application/json"
MAX_ENTRIES: Final = 100_000
_MARKS: Final = ",:[{"
_TOO_MANY: Final = f"it has more than {MAX_ENTRIES} commas, colons and brackets"
_HALF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")


def read_json_object() -> dict[str, Any]:
    """Return the JSON object that the call at hand carries.

    Raises:
        MalformedRequest: It carries none, or one that cannot be read.
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
        raise MalformedRequest(f"The body is not valid JSON: {reason}.") from None
    if not isinstance(value, dict):
        raise MalformedRequest("The body is not a JSON object; send one such as {...}.")
    return value


def parse_json(text: str) -> Any:
    """Return the value that a JSON text says.

    Raises:
        ValueError: It is none, or one that other readers might read differently, or has more
            entries than any call has.
        RecursionError: It is nested too deep.
    """
    if _marks(text) > MAX_ENTRIES:
        raise ValueError(_TOO_MANY)
    value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct)
    if _HALF_PAIR.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it contains half of a surrogate pair, which is not text") from None
    return value


def _marks(text: str) -> int:
    """Count what an entry needs; each takes up to a hundred bytes of memory for two of text."""
    return sum(map(text.count, _MARKS))


def fingerprint(body: dict[str, Any]) -> str:
    """Return a hash that two bodies share only when they say the same, whatever their spacing."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), default=_digest)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _digest(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} is given twice in one object")
        found[name] = value
    return found


FORM: Final = "multipart/form-data"
MAX_FIELDS: Final = 1000  # as many parts as werkzeug reads of a multipart form
_PLAIN_FORM: Final = "application/x-www-form-urlencoded"
_PART: Final = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<key>[^\[\]]*)\])?\Z")


def is_form() -> bool:
    """Whether the call at hand carries a form."""
    if request.mimetype == _PLAIN_FORM:
        # curl sends JSON as this type by default: that is refused as JSON, not read as a form.
        return not request.get_data().lstrip().startswith(b"{")
    return request.mimetype == FORM


def read_form(schema: Schema) -> dict[str, Any]:
    """Return the fields of the form that the call at hand carries; files are bytes.

    Texts of fields that `schema` does not have as text are read as JSON where they can be. A file
    that comes several times under one name is a list.

    Raises:
        MalformedRequest: A name cannot be read, or is given twice.
        werkzeug.exceptions.RequestEntityTooLarge: It is larger than a body may be.
    """
    if request.mimetype == _PLAIN_FORM:
        _refuse_crowded(request.get_data())
    if sum(_marks(text) for _, text in request.form.items(multi=True)) > MAX_ENTRIES:
        raise MalformedRequest(f"The form cannot be read: {_TOO_MANY}.")
    found: dict[str, Any] = {}
    for name, text in request.form.items(multi=True):
        _put(found, name or "", _Value(text, schema))  # a part may come without a name
    for name, file in request.files.items(multi=True):
        with file.stream:
            _put(found, name or "", _Value(file.read(), schema))
    return found


def _refuse_crowded(form: bytes) -> None:
    if form.count(b"&") >= MAX_FIELDS:
        raise MalformedRequest(f"The form has more than {MAX_FIELDS} fields.")
    # Each escape takes 220 bytes while it is read; a picture in base64 has one in 34 bytes.
    most = max(MAX_ENTRIES, len(form) // 32)
    if form.count(b"%") > most:
        raise MalformedRequest(
            f"The form has more than {most} characters as %XX; send it as {FORM}."
        )


@dataclass(frozen=True, slots=True)
class _Value:
    """One part of a form."""

    content: str | bytes
    schema: Schema

    def typed(self, name: str, kinds: tuple[type[fields.Field[Any]], ...]) -> Any:
        if isinstance(self.content, bytes) or isinstance(self.schema.fields.get(name), kinds):
            return self.content
        try:
            return parse_json(self.content)
        except (ValueError, RecursionError):
            # What it should have been, the check of the field says better.
            return self.content


def _put(found: dict[str, Any], part: str | None, value: _Value) -> None:
    part = part or ""  # werkzeug gives None for a part that says no name
    match = _PART.match(part)
    if match is None:
        raise MalformedRequest(f"{part[:80]!r} is not the name of a form field.")
    name, key = match["name"], match["key"]
    if key is None and isinstance(found.get(name), bytes | list) and type(value.content) is bytes:
        there = found[name]
        found[name] = [*(there if isinstance(there, list) else [there]), value.content]
    elif key is None:
        _set(found, name, name, value.typed(name, (fields.String,)))
    elif key == "":
        there = found.setdefault(name, [])
        if not isinstance(there, list):
            raise _twice(name)
        there.append(value.content)
    else:
        there = found.setdefault(name, {})
        # A dictionary field is one of texts.
        _set(there, key, name, value.typed(name, (fields.Dict,)))


def _set(found: Any, key: str, name: str, value: Any) -> None:
    if not isinstance(found, dict) or key in found:
        raise _twice(name)
    found[key] = value


def _twice(name: str) -> MalformedRequest:
    return MalformedRequest(f"{name[:80]!r} is given twice in the form.", param=name[:80])


def read_body(schema: Schema) -> dict[str, Any]:
    """Return the fields of the call at hand; a form's texts become what `schema` has them as.

    Raises:
        MalformedRequest: It cannot be read.
        werkzeug.exceptions.RequestEntityTooLarge: It is larger than a body may be.
    """
    if request.mimetype != JSON and is_form():
        return read_form(schema)
    return read_json_object()


def body_content(schema: type[Schema], *types: str) -> dict[str, Any]:
    """Return what OpenAPI shows of a body: JSON and a form, or the `types` that are given."""
    content = {media_type: {"schema": schema} for media_type in types or (JSON, FORM)}
    return {"required": True, "content": content}
