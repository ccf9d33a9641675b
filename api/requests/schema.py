"""The schemas of requests: bodies, edits, and what calls answer."""

from __future__ import annotations

from collections.abc import Mapping
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

from api.http.fields import (
    MAX_NAME,
    MAX_PAIRS,
    MAX_VALUE,
    FlagField,
    ImageField,
    ImagesField,
    ListSchema,
    LoraField,
    MetadataField,
    NumberField,
    ShortTextField,
    SizeField,
    TextField,
    WholeField,
    described,
    number,
    one_of,
    text,
    whole,
)
from api.models.catalog import ServedModel
from configs.errors import FieldError
from configs.fields import UNKNOWN_KEY, OneOf, nearest
from configs.parameters import OUTPUT_FORMATS
from routing.request import WEBHOOK_EVENTS, Priority, Status

_DATA_URL: Final = {"type": "string"}


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
    near = nearest(name, known)
    return f"{UNKNOWN_KEY}; " + (f"did you mean {near}?" if near else "remove it")


_MAX_PAGE = 100


_PAGE = 20


class ListQuerySchema(Schema):
    """The query of `GET /v1/requests`."""

    status = OneOf(*Status, metadata={"description": "Only those in this state."})
    model = text("Only those of this model.")
    limit = fields.Integer(
        load_default=_PAGE,
        validate=validate.Range(1, _MAX_PAGE, error=f"is not from 1 to {_MAX_PAGE}"),
        error_messages={"invalid": "is not a whole number"},
        metadata={"description": "How many at most."},
    )
    after = text("Id of the last request of the page before.")


class ProgressSchema(Schema):
    """How far a request is."""

    step = whole("Denoising steps done.")
    steps = whole("Denoising steps in all.")
    fraction = number("From 0 to 1.")
    eta_s = number("Seconds that the remaining steps will take.", allow_none=True)


class TimingsSchema(Schema):
    """Seconds spent in each part; null where it was not reached."""

    queued_s = number("From submit to start.", allow_none=True)
    encode_s = number("Prompt to embeddings.", allow_none=True)
    denoise_s = number("All denoising steps.", allow_none=True)
    decode_s = number("Latents to pictures.", allow_none=True)
    total_s = number("From submit to end.", allow_none=True)
    batch_mean = number(
        "Mean number of requests that shared a denoiser call with this one.", allow_none=True
    )


class LoraSchema(Schema):
    """One adapter of a request."""

    name = text("As the model lists it.")
    scale = number("Its weight; 1 is as it was trained.")


class ParametersSchema(Schema):
    """All generation parameters, the drawn seed and the defaults too."""

    prompt = text("What the output shows.")
    seed = whole("Seed of output 0; output k has seed + k.")
    width = whole("Pixels.")
    height = whole("Pixels.")
    num_inference_steps = whole("Denoising steps.")
    task = text("What the pipeline does.")
    negative_prompt = text("What the output does not show.", allow_none=True)
    guidance_scale = number("Weight of the prompt.", allow_none=True)
    true_cfg_scale = number("The same, for guidance-distilled families.", allow_none=True)
    num_outputs_per_prompt = whole("How many outputs.")
    scheduler = text("Noise scheduler; null for the model's own.", allow_none=True)
    lora = fields.List(fields.Nested(LoraSchema), metadata={"description": "Adapters."})
    image = fields.List(fields.String(), metadata={"description": "Paths of the input images."})
    mask_image = text("Path of the mask.", allow_none=True)
    strength = number("How much of the image is made anew.", allow_none=True)
    num_frames = whole("Frames of a video.", allow_none=True)
    fps = number("Frames in a second of a video.", allow_none=True)
    output_format = one_of(OUTPUT_FORMATS, "File format of the outputs.")
    output_compression = whole("Quality of jpeg and webp.", allow_none=True)
    deterministic = fields.Boolean(metadata={"description": "Whether it runs alone."})
    preview = fields.Boolean(metadata={"description": "Whether its events show small pictures."})


class OutputObjectSchema(Schema):
    """One file of a request."""

    url = text("Path of the file.")
    media_type = text("Its media type.")
    width = whole("Pixels.")
    height = whole("Pixels.")
    seed = whole("Makes this output again, alone.")
    bytes = whole("Size of the file.")
    num_frames = whole("Frames of a video.", allow_none=True)
    fps = number("Frames in a second of a video.", allow_none=True)
    expires_at = number("When it is removed.", allow_none=True)


class FailureSchema(Schema):
    """Why a request ended without outputs."""

    code = text("Stable word for programs.")
    message = text("For people.")
    retryable = fields.Boolean(metadata={"description": "Whether the same request may succeed."})


class LinksSchema(Schema):
    """Paths of the calls about a request."""

    get = text("The request.")
    cancel = text("Where to POST to cancel it.")
    events = text("Its events, as a stream.")


class WebhookObjectSchema(Schema):
    """Where a client is told of what, and whether it was told of the end."""

    url = text("Address.")
    events = fields.List(fields.String(), metadata={"description": "Of what it is told."})
    tries = whole("How often the end was tried to be told.")
    delivered_at = number("When it was.", allow_none=True)
    error = text("Why the last try failed.", allow_none=True)


class RequestObjectSchema(Schema):
    """A request. Times are seconds since the epoch."""

    id = text("Its id.")
    object = text("Always `request`.")
    status = one_of(Status, "Where it stands; `running` only once a replica has claimed it.")
    model = text("Which model.")
    task = text("What the pipeline does.")
    replica = text("The replica that has it.")
    attempt = whole("1, and one more after each move to another replica.")
    priority = one_of(Priority, "Its class in the line.")
    affinity_key = text(
        "Requests of one key go to one replica, as far as they can.", allow_none=True
    )
    queue_position = whole("1 for the next; null unless queued.", allow_none=True)
    progress = fields.Nested(ProgressSchema)
    created_at = number("When it was accepted.")
    started_at = number("When a replica claimed it.", allow_none=True)
    finished_at = number("When it ended.", allow_none=True)
    start_by = number("When it expires unless it has started.", allow_none=True)
    timeout = number("Seconds it may run.", allow_none=True)
    timings = fields.Nested(TimingsSchema)
    parameters = fields.Nested(ParametersSchema)
    outputs = fields.List(fields.Nested(OutputObjectSchema))
    warnings = fields.List(fields.String())
    error = fields.Nested(FailureSchema, allow_none=True)
    metadata = fields.Dict(keys=fields.String(), values=fields.String())
    webhook = fields.Nested(WebhookObjectSchema, allow_none=True)
    urls = fields.Nested(LinksSchema)


class RequestListSchema(ListSchema):
    """Requests, the newest first."""

    data = fields.List(fields.Nested(RequestObjectSchema))
