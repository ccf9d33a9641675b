"""The fields of bodies and answers, on top of the field types of the configuration."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from marshmallow import Schema, ValidationError, fields, validate

from configs.fields import Text, Whole

MAX_PAIRS: Final = 16
MAX_NAME: Final = 64
MAX_VALUE: Final = 512
MAX_PAGE: Final = 100
_PAGE: Final = 20
_SIZE: Final = re.compile(r"([0-9]{1,9})x([0-9]{1,9})\Z")
_MOST_HEAD: Final = 1024  # characters of a data URL before its data
_SPACES: Final = b" \t\r\n\f\v"
_OF_URLS: Final = bytes.maketrans(b"-_", b"+/")
_DIGITS: Final = 3


def described(text: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a field that OpenAPI shows."""
    return {"description": text, **more}


# Fields of answers. `of` makes the value out of the object; without it, it is the attribute of the
# field's name.


def text(description: str, of: Any = None, **options: Any) -> fields.String:
    """Return a text of an answer."""
    return fields.String(attribute=of, metadata={"description": description}, **options)


def whole(description: str, of: Any = None, **options: Any) -> fields.Integer:
    """Return a whole number of an answer."""
    return fields.Integer(attribute=of, metadata={"description": description}, **options)


def number(description: str, of: Any = None, **options: Any) -> fields.Float:
    """Return a number of an answer."""
    return fields.Float(attribute=of, metadata={"description": description}, **options)


def flag(description: str, of: Any = None, **options: Any) -> fields.Boolean:
    """Return a yes or no of an answer."""
    return fields.Boolean(attribute=of, metadata={"description": description}, **options)


def texts(description: str = "", of: Any = None) -> fields.List[str]:
    """Return a list of texts of an answer."""
    metadata = {"description": description} if description else {}
    return fields.List(fields.String(), attribute=of, metadata=metadata)


def nested(
    schema: type[Schema], of: Any = None, *, many: bool = False, **options: Any
) -> fields.Field[Any]:
    """Return an object of an answer, or with `many` a list of them."""
    if many:
        return fields.List(fields.Nested(schema), attribute=of, **options)
    return fields.Nested(schema, attribute=of, **options)


def one_of(words: Any, description: str, of: Any = None) -> fields.String:
    """Return one of some words of an answer."""
    names = [str(word) for word in words]
    return text(description, of, validate=validate.OneOf(names))


def always(word: str) -> fields.Field[Any]:
    """Return a text of an answer that never changes."""
    metadata = {"description": f"Always `{word}`.", "type": "string"}
    return fields.Constant(word, metadata=metadata)


class SecondsField(fields.Float):
    """Seconds of an answer, to the millisecond."""

    def __init__(self, description: str, of: Any = None, **options: Any) -> None:
        super().__init__(attribute=of, metadata={"description": description}, **options)

    def _serialize(self, value: Any, *_: Any, **__: Any) -> float | None:
        return None if value is None else round(float(value), _DIGITS)


class AnswerSchema(Schema):
    """Dumped from a dataclass: a field's value is an attribute of it, or what its `of` makes."""

    def get_attribute(self, obj: Any, attr: str | Callable[[Any], Any], default: Any) -> Any:
        """Return the value of a field."""
        return attr(obj) if callable(attr) else getattr(obj, attr)


@dataclass(frozen=True, slots=True)
class Page:
    """A list, or a part of one, and whether more comes after it."""

    data: Sequence[Any]
    has_more: bool = False


class ListSchema(AnswerSchema):
    """The one shape of all lists; dumped from a page."""

    object = always("list")
    has_more = flag("Whether there is a next page.")


def page_size(least: int) -> fields.Integer:
    """Return the field of a query that says how many are wanted."""
    return Whole(
        strict=False,
        load_default=_PAGE,
        validate=validate.Range(least, MAX_PAGE, error=f"is not from {least} to {MAX_PAGE}"),
        metadata=described("How many at most."),
    )


# Fields of bodies.


class ShortTextField(Text):
    """Text as long as a name may be."""

    def __init__(self, description: str, **more: Any) -> None:
        super().__init__(metadata=described(description, minLength=1, maxLength=MAX_NAME, **more))

    def _deserialize(self, value: Any, *rest: Any, **options: Any) -> str:
        given = str(super()._deserialize(value, *rest, **options))
        if not 1 <= len(given) <= MAX_NAME:
            raise ValidationError(f"has {len(given)} characters; use 1 to {MAX_NAME}")
        return given


class SizeField(fields.String):
    """`"64x48"`, as (width, height)."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> Any:
        match = _SIZE.match(value) if isinstance(value, str) else None
        if match is None:
            raise ValidationError('is not a size; write width x height, such as "64x64"')
        return int(match[1]), int(match[2])


class WrongPicture(ValueError):
    """Raised when bytes or a text are no picture that is accepted; its text begins with a verb."""


def decode_data_url(url: str) -> bytes:
    """Return the bytes that a data URL of a picture holds, in time that grows with its length.

    Line breaks and other space in the base64, its alphabet for URLs, and a missing `=` at its end
    are understood.

    Raises:
        WrongPicture: It is no data URL, not of a picture, or not in base64.
    """
    url = url.lstrip()
    head, begin = "", url.find(",", 0, _MOST_HEAD)
    if begin > 0:
        head = url[:begin].lower()
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise WrongPicture(
            "is not a data URL of a picture; write data:image/png;base64, and the file in base64. "
            "Other addresses are never fetched"
        )
    try:
        return _from_base64(url[begin + 1 :].encode("ascii").translate(None, _SPACES))
    except ValueError:
        raise WrongPicture("is a data URL whose base64 cannot be decoded") from None


def _from_base64(text: bytes) -> bytes:
    """Decode either alphabet, never a mixture; raises ValueError for what is neither."""
    if (b"-" in text or b"_" in text) and not (b"+" in text or b"/" in text):
        text = text.translate(_OF_URLS)
    if missing := -len(text) % 4:
        text += b"=" * missing
    return base64.b64decode(text, validate=True)


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
        read, wrong = [], {}
        for index, each in enumerate(value):
            try:
                read.append(_image_bytes(each))
            except ValidationError as fault:
                wrong[index] = fault.messages
        if wrong:
            raise ValidationError(wrong if len(value) > 1 else wrong[0])
        return tuple(read)


def _image_bytes(value: Any) -> bytes:
    if isinstance(value, dict):
        if set(value) != {"image_url"}:
            raise ValidationError('is not an object with just an "image_url"')
        value = value["image_url"]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValidationError("is not text; send a data URL, or a file in a form")
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
            raise ValidationError(f"has {len(value)} entries; use {MAX_PAIRS} at most")
        faults = {
            name[:MAX_NAME]: [fault]
            for name, content in value.items()
            if (fault := _fault(name, content))
        }
        if faults:
            raise ValidationError(faults)
        return value


def _fault(name: str, content: Any) -> str | None:
    if not 1 <= len(name) <= MAX_NAME:
        return f"has a name of {len(name)} characters; use 1 to {MAX_NAME}"
    if not isinstance(content, str):
        return "is not text"
    if len(content) > MAX_VALUE:
        return f"has {len(content)} characters; use {MAX_VALUE} at most"
    return None


_MAX_LORAS: Final = 8
_MAX_SCALE: Final = 100.0
_SHOWN: Final = 64  # characters of a name that a message shows
_LORA: Final = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "scale": {"type": "number", "minimum": -_MAX_SCALE, "maximum": _MAX_SCALE, "default": 1.0},
    },
    "additionalProperties": False,
}
LORA_FORMS: Final = [_LORA, {"type": "array", "items": _LORA, "maxItems": _MAX_LORAS}]


class LoraField(fields.Field[list[dict[str, Any]]]):
    """`{"name": ..., "scale": ...}`, or a list of such; as a list of both."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> list[dict[str, Any]]:
        entries = value if isinstance(value, list) else [value]
        if len(entries) > _MAX_LORAS:
            raise ValidationError(f"has {len(entries)} adapters; use {_MAX_LORAS} at most")
        loras = [_lora(entry) for entry in entries]
        names = [lora["name"] for lora in loras]
        for name in names:
            if names.count(name) > 1:
                raise ValidationError(f"names {name[:_SHOWN]!r} twice; give one scale for it")
        return loras


def _lora(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ValidationError('is not an adapter; write {"name": "...", "scale": 1.0}, or a list')
    unknown = sorted(set(entry) - {"name", "scale"})
    if unknown:
        raise ValidationError(f"has {unknown[0][:_SHOWN]!r}; only name and scale are allowed")
    scale = entry.get("scale", 1.0)
    right = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not right or not -_MAX_SCALE <= scale <= _MAX_SCALE:
        raise ValidationError(
            f"has a scale for {entry['name'][:_SHOWN]!r} that is not a number from "
            f"-{_MAX_SCALE:g} to {_MAX_SCALE:g}"
        )
    return {"name": entry["name"], "scale": float(scale)}
