"""The shape of a request's body: which fields there are, and of which type.

Every wrong field is found at once. Limits are not checked here: they depend on the model and the
settings (`api/parameter_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Final

from marshmallow import (
    EXCLUDE,
    Schema,
    ValidationError,
    fields,
    pre_load,
    validate,
    validates_schema,
)

from api.body_fields import (
    MAX_NAME,
    MAX_PAIRS,
    MAX_VALUE,
    FlagField,
    ImageField,
    ImagesField,
    MetadataField,
    NumberField,
    ShortTextField,
    SizeField,
    TextField,
    WholeField,
    described,
)
from api.catalog import ServedModel
from api.lora_field import LoraField
from configs.errors import FieldError
from configs.field_types import OneOf
from configs.refusal import UNKNOWN_KEY
from routing.formats import OUTPUT_FORMATS
from routing.record import WEBHOOK_EVENTS, Priority

_DATA_URL: Final = {"type": "string"}
_SHORTEST_PART: Final = 4
_NEAR: Final = 0.6


class WebhookSchema(Schema):
    """Where a client wants to be told of what."""

    url = TextField(
        "Where to POST; https, or http.", required=True, example="https://me.example/hook"
    )
    events = fields.List(
        OneOf(*WEBHOOK_EVENTS),
        validate=validate.Length(min=1, error="is empty; name one, or leave it out"),
        metadata=described("Of what; the end alone where none are named.", default=["ended"]),
    )

    @validates_schema(pass_original=True, skip_on_field_errors=False)
    def _refuse_unknown(self, _: Any, original: Any, **__: Any) -> None:
        unknown = sorted(set(original) - set(self.fields))
        if unknown:
            raise ValidationError({name: [_unknown(name, list(self.fields))] for name in unknown})


class RequestBodySchema(Schema):
    """What `POST /v1/requests` takes. null counts as not given; a field unknown here is refused."""

    class Meta:
        """Unknown fields are refused by hand, with the nearest known one."""

        unknown: ClassVar[str] = EXCLUDE

    model = TextField("Which model; may be left out where there is only one.", example="tiny")
    task = TextField(
        "What the pipeline is to do; picked from the inputs where it is left out: `inpaint` with a "
        "mask, a task with image input where there is an image, else one from text alone."
    )
    prompt = TextField("What the output should show.", required=True, example="a red circle")
    negative_prompt = TextField("What it should not show.")
    width = WholeField("Pixels; a multiple of the model's size multiple.", minimum=1)
    height = WholeField("Pixels; a multiple of the model's size multiple.", minimum=1)
    size = SizeField(
        metadata=described("Width and height in one, instead of the two.", example="64x64")
    )
    num_inference_steps = WholeField("Denoising steps.", minimum=1)
    guidance_scale = NumberField("Weight of the prompt (classifier-free guidance).", minimum=0)
    true_cfg_scale = NumberField("The same, for guidance-distilled families.", minimum=0)
    num_outputs_per_prompt = WholeField("How many outputs; output k has seed + k.", minimum=1)
    seed = WholeField(
        "Seed of output 0; the last output's may be 2^63 - 1 at most. Drawn, and shown in the "
        "answer, where none is given.",
        minimum=0,
    )
    scheduler = TextField("Noise scheduler by class name; the model's own where none is given.")
    lora = LoraField()
    image = ImagesField(
        metadata=described(
            "Input picture, or a list of them: PNG, JPEG or WebP as a data URL, or files in a "
            "form. Width and height follow the first one where neither is given.",
            anyOf=[_DATA_URL, {"type": "array", "items": _DATA_URL, "minItems": 1}],
        )
    )
    mask_image = ImageField(
        metadata=described(
            "What to paint anew is white or transparent in it; as large as `image`.", **_DATA_URL
        )
    )
    strength = NumberField(
        "How much of the first image is made anew: 1 all of it, with all steps.",
        minimum=0,
        maximum=1,
    )
    num_frames = WholeField(
        "Frames of a video: 1 and a multiple of the model's `frames_step` more.", minimum=1
    )
    fps = NumberField("Frames in a second of a video.", minimum=1, maximum=120)
    output_format = OneOf(
        *OUTPUT_FORMATS,
        metadata=described("File format of the outputs; png, or mp4 for videos, by default."),
    )
    output_compression = WholeField("Quality of jpeg and webp.", minimum=0, maximum=100)
    deterministic = FlagField("Run alone, so that the bytes are equal on any replica.")
    preview = FlagField("Show small pictures of it in its events while it runs.")
    priority = OneOf(*Priority, metadata=described("Place in the line.", default="normal"))
    affinity_key = ShortTextField(
        "Requests of one key go to one replica while it is ready and its line is not full.",
        example="user-42",
    )
    expires_in = NumberField("Seconds within which it must start.", minimum=0)
    timeout = NumberField("Seconds it may run.", minimum=0)
    webhook = fields.Nested(
        WebhookSchema(unknown=EXCLUDE),
        metadata=described("Tell an address of yours what becomes of it (Standard Webhooks)."),
    )
    metadata = MetadataField(
        keys=fields.String(),
        values=fields.String(),
        metadata=described(
            f"Up to {MAX_PAIRS} short texts of your own (names up to {MAX_NAME}, texts up to "
            f"{MAX_VALUE} characters), handed back as they are."
        ),
    )

    # Parameters by the names that a dialect has for them, and may have besides.
    words: ClassVar[Mapping[str, str]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Make the fields of a dialect into those of a request; return what is wrong with them."""
        return []

    @pre_load
    def _drop_nulls(self, data: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        return {name: value for name, value in data.items() if value is not None}

    @validates_schema(pass_original=True, skip_on_field_errors=False)
    def _refuse_unknown(self, _: Any, original: Mapping[str, Any], **__: Any) -> None:
        unknown = [name for name in original if name not in self.fields]
        if unknown:
            raise ValidationError({name: [_unknown(name, list(self.fields))] for name in unknown})


class RequestEditSchema(RequestBodySchema):
    """What `PATCH /v1/requests/{id}` takes; null puts the default back (not for `expires_in`)."""

    prompt = TextField("What the output should show.")


def _unknown(name: str, known: list[str]) -> str:
    near = [field for field in known if len(name) >= _SHORTEST_PART and name in field]
    near = near or get_close_matches(name, known, n=1, cutoff=_NEAR)
    return f"{UNKNOWN_KEY}; " + (f"did you mean {near[0]}?" if near else "leave it out")
