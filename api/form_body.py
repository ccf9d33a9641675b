"""A body as a form: files as they are, texts made into what JSON would have brought.

It is `multipart/form-data`, or urlencoded, as some clients send one that holds no file.
`num_inference_steps=20` becomes the number 20, so that a form is checked by the same rules as JSON.
`name[]` is one of a list, `name[key]` an entry of an object. Does not know what the fields mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from flask import request
from marshmallow import Schema, fields

from api.json_body import parse_json
from configs.errors import MalformedRequest

FORM: Final = "multipart/form-data"
_PLAIN_FORM: Final = "application/x-www-form-urlencoded"
_PART: Final = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<key>[^\[\]]*)\])?\Z")


def is_form() -> bool:
    """Whether the call at hand carries a form."""
    if request.mimetype == _PLAIN_FORM:
        # What curl calls JSON unless it is told better is better told so than read as a form.
        return not request.get_data().lstrip().startswith(b"{")
    return request.mimetype == FORM


def read_form(schema: Schema) -> dict[str, Any]:
    """Return the fields of the form that the call at hand carries; files are bytes.

    Texts of fields that `schema` does not have as text are read as JSON where they can be. A file
    that comes several times under one name is a list.

    Raises:
        MalformedRequest: A name can not be read, or stands twice.
        werkzeug.exceptions.RequestEntityTooLarge: It is larger than a body may be.
    """
    found: dict[str, Any] = {}
    for name, text in request.form.items(multi=True):
        _put(found, name or "", _Value(text, schema))  # a part may come without a name
    for name, file in request.files.items(multi=True):
        with file.stream:
            _put(found, name or "", _Value(file.read(), schema))
    return found


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
        raise MalformedRequest(f"{part[:80]!r} is no name of a form field.")
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
    return MalformedRequest(f"{name[:80]!r} stands twice in the form.", param=name[:80])
