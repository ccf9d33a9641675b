"""The fields of bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from marshmallow import Schema, ValidationError, fields, validate

from api.requests.inputs import WrongPicture, decode_data_url

_SIZE: Final = re.compile(r"([0-9]{1,9})x([0-9]{1,9})\Z")


MAX_PAIRS: Final = 16
MAX_NAME: Final = 64
MAX_VALUE: Final = 512


def described(text: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a field that OpenAPI shows."""
    return {"description": text, **more}


class WholeField(fields.Integer):
    """A whole number: neither text, nor true, nor 4.0."""

    def __init__(self, text: str, **more: Any) -> None:
        reason = "is not a whole number"
        super().__init__(
            strict=True,
            error_messages={"invalid": reason, "too_large": reason},
            metadata=described(text, **more),
        )


class NumberField(fields.Float):
    """A finite number: neither text nor true."""

    def __init__(self, text: str, **more: Any) -> None:
        reason = "is not a number"
        super().__init__(
            error_messages={"invalid": reason, "special": "is not finite", "too_large": reason},
            metadata=described(text, **more),
        )

    def _deserialize(self, value: Any, attr: str | None, data: Any, **options: Any) -> float:
        if isinstance(value, str):
            raise self.make_error("invalid", input=value)
        return super()._deserialize(value, attr, data, **options)


class TextField(fields.String):
    """Text, and no number instead."""

    def __init__(self, text: str, *, required: bool = False, **more: Any) -> None:
        super().__init__(
            required=required,
            error_messages={"invalid": "is not text", "required": "is missing"},
            metadata=described(text, **more),
        )


class ShortTextField(TextField):
    """Text as long as a name may be."""

    def __init__(self, text: str, **more: Any) -> None:
        super().__init__(text, minLength=1, maxLength=MAX_NAME, **more)

    def _deserialize(self, value: Any, *rest: Any, **options: Any) -> str:
        given = str(super()._deserialize(value, *rest, **options))
        if not 1 <= len(given) <= MAX_NAME:
            raise ValidationError(f"has {len(given)} characters; 1 to {MAX_NAME} are right")
        return given


class FlagField(fields.Boolean):
    """true or false, and no word or number instead."""

    def __init__(self, text: str, **more: Any) -> None:
        super().__init__(metadata=described(text, **more))

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> bool:
        if not isinstance(value, bool):
            raise ValidationError("is neither true nor false")
        return value


class SizeField(fields.String):
    """`"64x48"`, as (width, height)."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> Any:
        match = _SIZE.match(value) if isinstance(value, str) else None
        if match is None:
            raise ValidationError('is not a size; write width x height, such as "64x64"')
        return int(match[1]), int(match[2])


class ImageField(fields.Field[bytes]):
    """A data URL, or the bytes of a file in a form; as bytes."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> bytes:
        return _image_bytes(value)


class ImagesField(fields.Field[tuple[bytes, ...]]):
    """One picture or several, as a tuple."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> tuple[bytes, ...]:
        if not isinstance(value, list):
            return (_image_bytes(value),)
        if not value:
            raise ValidationError("is an empty list; leave it out")
        return tuple(_image_bytes(each) for each in value)


def _image_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValidationError("is no text; send a data URL, or a file in a form")
    try:
        return decode_data_url(value)
    except WrongPicture as wrong:
        raise ValidationError(str(wrong)) from None


class MetadataField(fields.Dict):
    """A few short texts by short names."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise ValidationError("is not an object of short texts")
        if len(value) > MAX_PAIRS:
            raise ValidationError(f"has {len(value)} entries; {MAX_PAIRS} is the most")
        faults = {
            name[:MAX_NAME]: [fault]
            for name, text in value.items()
            if (fault := _fault(name, text))
        }
        if faults:
            raise ValidationError(faults)
        return value


def _fault(name: str, text: Any) -> str | None:
    if not 1 <= len(name) <= MAX_NAME:
        return f"has a name of {len(name)} characters; 1 to {MAX_NAME} are right"
    if not isinstance(text, str):
        return "is not text"
    if len(text) > MAX_VALUE:
        return f"has {len(text)} characters; {MAX_VALUE} is the most"
    return None


def text(description: str, **more: Any) -> fields.String:
    """Return a text that the spec describes."""
    return fields.String(metadata={"description": description}, **more)


def whole(description: str, **more: Any) -> fields.Integer:
    """Return a whole number that the spec describes."""
    return fields.Integer(metadata={"description": description}, **more)


def number(description: str, **more: Any) -> fields.Float:
    """Return a number that the spec describes."""
    return fields.Float(metadata={"description": description}, **more)


def one_of(words: Any, description: str) -> fields.String:
    """Return one of some words."""
    names = [str(word) for word in words]
    return fields.String(validate=validate.OneOf(names), metadata={"description": description})


class ListSchema(Schema):
    """The one shape of all lists."""

    object = text("Always `list`.")
    has_more = fields.Boolean(metadata={"description": "Whether there is a next page."})


_MAX_LORAS: Final = 8


_MAX_SCALE: Final = 100.0


# Characters of a name that a message shows.
_SHOWN: Final = 64


_LORA: Final = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "scale": {"type": "number", "minimum": -_MAX_SCALE, "maximum": _MAX_SCALE, "default": 1.0},
    },
    "additionalProperties": False,
}


class LoraField(fields.Field[list[dict[str, Any]]]):
    """`{"name": ..., "scale": ...}`, or a list of such; as a list of both."""

    def __init__(self) -> None:
        """Show both forms in OpenAPI."""
        super().__init__(
            metadata={
                "description": "Adapter by name, or a list of them, each with its weight; the "
                "model lists them.",
                "anyOf": [_LORA, {"type": "array", "items": _LORA, "maxItems": _MAX_LORAS}],
            }
        )

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> list[dict[str, Any]]:
        entries = value if isinstance(value, list) else [value]
        if len(entries) > _MAX_LORAS:
            raise ValidationError(f"has {len(entries)} adapters; {_MAX_LORAS} is the most")
        loras = [_lora(entry) for entry in entries]
        names = [lora["name"] for lora in loras]
        for name in names:
            if names.count(name) > 1:
                raise ValidationError(f"names {name[:_SHOWN]!r} twice; give one scale for it")
        return loras


def _lora(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ValidationError('is no adapter; write {"name": "...", "scale": 1.0}, or a list')
    unknown = sorted(set(entry) - {"name", "scale"})
    if unknown:
        raise ValidationError(f"has {unknown[0][:_SHOWN]!r}; name and scale are all it takes")
    scale = entry.get("scale", 1.0)
    right = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not right or not -_MAX_SCALE <= scale <= _MAX_SCALE:
        raise ValidationError(
            f"has a scale for {entry['name'][:_SHOWN]!r} that is no number from "
            f"-{_MAX_SCALE:g} to {_MAX_SCALE:g}"
        )
    return {"name": entry["name"], "scale": float(scale)}
