"""The kinds of fields of a request's body: each takes one type, and says what it is not.

Knows no schema and no limits of a model.
"""

from __future__ import annotations

import re
from typing import Any, Final

from marshmallow import ValidationError, fields

from api.input_images import WrongPicture, decode_data_url

_SIZE: Final = re.compile(r"([0-9]{1,9})x([0-9]{1,9})\Z")
MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512


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
