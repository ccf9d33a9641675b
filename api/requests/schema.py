"""The schemas of the bodies and queries of requests, made of the table of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

from marshmallow import EXCLUDE, Schema, ValidationError, fields, validate, validates_schema

from api.http.fields import (
    LORA_FORMS,
    MAX_NAME,
    MAX_PAIRS,
    MAX_VALUE,
    ImageField,
    ImagesField,
    LoraField,
    MetadataField,
    ShortTextField,
    SizeField,
    described,
    page_size,
    text,
)
from api.models.catalog import ServedModel
from configs.errors import FieldError, InvalidRequest
from configs.fields import (
    UNKNOWN_KEY,
    Editable,
    Flag,
    Number,
    OneOf,
    Parameter,
    Text,
    Whole,
    nearest,
)
from configs.parameters import PARAMETERS
from configs.settings import Settings
from routing.request import DEFAULT_PRIORITY, WEBHOOK_EVENTS, Priority, Status

_MAX_SECONDS: Final = 31_536_000
_MOST_SHOWN: Final = 2**53  # larger numbers are not exact in JavaScript
_TEXT: Final = {"type": "string"}
IMAGE_FORMS: Final = [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]
# The parameters whose value in a body is more than a number, a word or a text.
_FORMS: Final[Mapping[str, tuple[type[fields.Field[Any]], dict[str, Any]]]] = {
    "lora": (LoraField, {"anyOf": LORA_FORMS}),
    "image": (ImagesField, {"anyOf": IMAGE_FORMS}),
    "mask_image": (ImageField, _TEXT),
}
_TYPES: Final[Mapping[type, type[fields.Field[Any]]]] = {
    int: Whole,
    float: Number,
    str: Text,
    bool: Flag,
}


def _body_field(parameter: Parameter) -> fields.Field[Any]:
    kind, shape = _FORMS.get(parameter.name) or (_TYPES[parameter.type], {})
    metadata = described(parameter.about, editable=parameter.editable, **shape)
    high = parameter.high
    known = {
        "minimum": parameter.low,
        "maximum": high if high is not None and high < _MOST_SHOWN else None,
        "example": parameter.example or None,
    }
    metadata |= {name: value for name, value in known.items() if value is not None}
    if parameter.words:
        return OneOf(*parameter.words, metadata=metadata)
    return kind(required=parameter.name == "prompt", metadata=metadata)


class _WaitField(Number):
    """Seconds of a body: above 0, and a year at most."""

    def _deserialize(self, value: Any, *rest: Any, **options: Any) -> float:
        seconds = float(super()._deserialize(value, *rest, **options))
        if not 0 < seconds <= _MAX_SECONDS:
            raise ValidationError(f"is not above 0 and at most {_MAX_SECONDS} seconds")
        return seconds


def unknown_fields(names: Any, schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield each name that the schema does not have, with what is wrong and what was meant.

    Only what is told is looked for among the known names, which takes a millisecond for each.
    """
    unknown = (name for name in names if name not in schema.fields)
    for index, name in enumerate(unknown):
        near = nearest(name, schema.fields) if index < InvalidRequest.most_details else None
        fix = f"did you mean {near}?" if near else "leave it out"
        yield name[:MAX_NAME], f"{UNKNOWN_KEY}; {fix}"


class WebhookSchema(Schema):
    """Where a client wants to be told of what."""

    url = Text(
        required=True,
        metadata=described("Where to POST; https, or http.", example="https://me.example/hook"),
    )
    events = fields.List(
        OneOf(*WEBHOOK_EVENTS),
        validate=validate.Length(min=1, error="is empty; name one, or leave it out"),
        load_default=("ended",),
        metadata=described("Of what; the end alone where none are named."),
    )

    @validates_schema(pass_original=True, skip_on_field_errors=False)
    def _refuse_unknown(self, _: Any, original: Any, **__: Any) -> None:
        unknown = {name: [reason] for name, reason in unknown_fields(original, self)}
        if unknown:
            raise ValidationError(unknown)


class _GenerationSchema(Schema):
    class Meta:
        include: ClassVar[dict[str, fields.Field[Any]]] = {
            name: _body_field(parameter) for name, parameter in PARAMETERS.items()
        }


class RequestBodySchema(_GenerationSchema):
    """The body of `POST /v1/requests`. null counts as not given; an unknown field is refused."""

    class Meta:
        unknown: ClassVar[str] = EXCLUDE  # refused by hand, with the nearest known one

    model = Text(
        metadata=described(
            "Which model; may be left out where there is only one.",
            editable=Editable.NEVER,
            example="tiny",
        )
    )
    size = SizeField(
        metadata=described("Width and height in one, instead of the two.", example="64x64")
    )
    priority = OneOf(
        *Priority, metadata=described("Place in the queue.", default=DEFAULT_PRIORITY.value)
    )
    affinity_key = ShortTextField(
        "Requests of one key go to one replica while it is ready and its queue is not full.",
        editable=Editable.NEVER,
        example="user-42",
    )
    client = ShortTextField(
        "Whose request it is: those of different clients are served in turns, by their work.",
        editable=Editable.NEVER,
        example="user-42",
    )
    expires_in = _WaitField(metadata=described("Seconds within which it must start.", minimum=0))
    timeout = _WaitField(
        metadata=described("Seconds it may run.", editable=Editable.RUNNING, minimum=0)
    )
    webhook = fields.Nested(
        WebhookSchema(unknown=EXCLUDE),
        metadata=described(
            "Tell an address of yours what becomes of it (Standard Webhooks).",
            editable=Editable.NEVER,
        ),
    )
    metadata = MetadataField(
        keys=fields.String(),
        values=fields.String(),
        metadata=described(
            f"Up to {MAX_PAIRS} short texts of your own (names up to {MAX_NAME}, texts up to "
            f"{MAX_VALUE} characters), handed back as they are.",
            editable=Editable.NEVER,
        ),
    )

    # Parameters by the names that a dialect has for them, and may have besides.
    words: ClassVar[Mapping[str, str]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Make the fields of a dialect into those of a request; return what is wrong with them."""
        return []

    def tolerate(self, given: dict[str, Any], model: ServedModel, settings: Settings) -> list[str]:
        """Accept what cannot do harm; return one sentence for each. A native body has none."""
        return []


class RequestEditSchema(RequestBodySchema):
    """The body of `PATCH /v1/requests/{id}`; null restores the default (not for `expires_in`)."""

    prompt = Text(metadata=described(PARAMETERS["prompt"].about))


def editable_in(editable: Editable) -> frozenset[str]:
    """Return the fields that may be edited until then, and no longer."""
    return frozenset(
        name
        for name, field in EDIT.fields.items()
        if field.metadata.get("editable", Editable.QUEUED) == editable
    )


class ListQuerySchema(Schema):
    """The query of `GET /v1/requests`."""

    status = OneOf(*Status, metadata=described("Only those in this state."))
    model = text("Only those of this model.")
    limit = page_size(1)
    after = text("Id of the last request of the page before.")


# Schemas cost more to make than to use.
BODY: Final = RequestBodySchema()
EDIT: Final = RequestEditSchema()
