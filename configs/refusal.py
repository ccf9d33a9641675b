"""Turns what a marshmallow schema refused into field errors with the path and the value found.

It knows how schemas of this package word their reasons (they begin with a verb), and nothing of
what the values mean.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from marshmallow import ValidationError

from configs.errors import FieldError

_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SCHEMA_KEY: Final = "_schema"
UNKNOWN_KEY: Final = "is an unknown key"


def field_errors(refused: ValidationError, source: Any) -> list[FieldError]:
    """Return one error for each reason in `refused`; `source` is what the schema was given."""
    return [
        FieldError(path, with_value(reason, value), _code(reason))
        for path, value, reason in _reasons(refused.messages_dict, source, "")
    ]


def _reasons(messages: Any, source: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Walk the messages and the source together: (path, value found there or None, reason)."""
    if isinstance(messages, Mapping):
        for key, inner in messages.items():
            if key == _SCHEMA_KEY:
                yield from _reasons(inner, source, path)
            elif isinstance(key, int):
                yield from _reasons(inner, _item(source, key), f"{path}[{key}]")
            else:
                yield from _reasons(inner, _item(source, key), f"{path}.{key}" if path else key)
    else:
        for reason in messages:
            yield path, source, str(reason)


def _item(source: Any, key: Any) -> Any:
    if isinstance(source, Mapping):
        return source.get(key)
    if isinstance(source, Sequence) and not isinstance(source, str) and isinstance(key, int):
        return source[key]
    return None


def with_value(reason: str, value: Any) -> str:
    """Put the value before the reason, shortened; an unknown key and a missing one have none."""
    if value is None or reason.startswith(UNKNOWN_KEY):
        return reason
    return f"{_SHORT.repr(value)} {reason}"


def _code(reason: str) -> str:
    if reason.startswith(UNKNOWN_KEY):
        return "unknown_key"
    return "missing" if reason.startswith("is missing") else "invalid"
