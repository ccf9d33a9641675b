"""The schemas of requests: the query of their list, and what their calls answer.

`api/presentation.py` makes the values.
"""

from __future__ import annotations

from marshmallow import Schema, fields, validate

from api.object_fields import ListSchema, number, one_of, text, whole
from configs.field_types import OneOf
from routing.formats import OUTPUT_FORMATS
from routing.outcome import Status
from routing.record import Priority

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
