"""The schemas of what the calls take in the query and answer: the spec's half of the contract.

`api/presentation.py` makes the values. Does not check bodies (`api/request_schema.py`).
"""

from __future__ import annotations

from typing import Any

from marshmallow import Schema, fields, validate

from configs.field_types import OneOf
from routing.parameters import OUTPUT_FORMATS
from routing.record import Priority, Status
from routing.replica import ReplicaState

_MAX_PAGE = 100
_PAGE = 20
_LONGEST_DRAIN_S = 86_400


def _text(description: str, **more: Any) -> fields.String:
    return fields.String(metadata={"description": description}, **more)


def _whole(description: str, **more: Any) -> fields.Integer:
    return fields.Integer(metadata={"description": description}, **more)


def _number(description: str, **more: Any) -> fields.Float:
    return fields.Float(metadata={"description": description}, **more)


def _one_of(words: Any, description: str) -> fields.String:
    names = [str(word) for word in words]
    return fields.String(validate=validate.OneOf(names), metadata={"description": description})


class ListQuerySchema(Schema):
    """The query of `GET /v1/requests`."""

    status = OneOf(*Status, metadata={"description": "Only those in this state."})
    model = _text("Only those of this model.")
    limit = fields.Integer(
        load_default=_PAGE,
        validate=validate.Range(1, _MAX_PAGE, error=f"is not from 1 to {_MAX_PAGE}"),
        error_messages={"invalid": "is not a whole number"},
        metadata={"description": "How many at most."},
    )
    after = _text("Id of the last request of the page before.")


class DrainQuerySchema(Schema):
    """The query of the calls that take a replica out of the rotation."""

    drain_s = fields.Float(
        validate=validate.Range(0, _LONGEST_DRAIN_S, error=f"is not from 0 to {_LONGEST_DRAIN_S}"),
        error_messages={"invalid": "is not a number", "special": "is not a number"},
        metadata={
            "description": "Seconds that what runs there may go on before it is handed back, at a "
            "step boundary, to another replica. By default the setting DRAIN_S."
        },
    )


class ProgressSchema(Schema):
    """How far a request is."""

    step = _whole("Denoising steps done.")
    steps = _whole("Denoising steps in all.")
    fraction = _number("From 0 to 1.")
    eta_s = _number("Seconds that the remaining steps will take.", allow_none=True)


class TimingsSchema(Schema):
    """Seconds spent in each part; null where it was not reached."""

    queued_s = _number("From submit to start.", allow_none=True)
    encode_s = _number("Prompt to embeddings.", allow_none=True)
    denoise_s = _number("All denoising steps.", allow_none=True)
    decode_s = _number("Latents to pictures.", allow_none=True)
    total_s = _number("From submit to end.", allow_none=True)
    batch_mean = _number(
        "Mean number of requests that shared a denoiser call with this one.", allow_none=True
    )


class LoraSchema(Schema):
    """One adapter of a request."""

    name = _text("As the model lists it.")
    scale = _number("Its weight; 1 is as it was trained.")


class ParametersSchema(Schema):
    """All generation parameters, the drawn seed and the defaults too."""

    prompt = _text("What the output shows.")
    seed = _whole("Seed of output 0; output k has seed + k.")
    width = _whole("Pixels.")
    height = _whole("Pixels.")
    num_inference_steps = _whole("Denoising steps.")
    task = _text("What the pipeline does.")
    negative_prompt = _text("What the output does not show.", allow_none=True)
    guidance_scale = _number("Weight of the prompt.", allow_none=True)
    true_cfg_scale = _number("The same, for guidance-distilled families.", allow_none=True)
    num_outputs_per_prompt = _whole("How many outputs.")
    scheduler = _text("Noise scheduler; null for the model's own.", allow_none=True)
    lora = fields.List(fields.Nested(LoraSchema), metadata={"description": "Adapters."})
    image = fields.List(fields.String(), metadata={"description": "Paths of the input images."})
    mask_image = _text("Path of the mask.", allow_none=True)
    strength = _number("How much of the image is made anew.", allow_none=True)
    num_frames = _whole("Frames of a video.", allow_none=True)
    fps = _number("Frames in a second of a video.", allow_none=True)
    output_format = _one_of(OUTPUT_FORMATS, "File format of the outputs.")
    output_compression = _whole("Quality of jpeg and webp.", allow_none=True)
    deterministic = fields.Boolean(metadata={"description": "Whether it runs alone."})
    preview = fields.Boolean(metadata={"description": "Whether its events show small pictures."})


class OutputObjectSchema(Schema):
    """One file of a request."""

    url = _text("Path of the file.")
    media_type = _text("Its media type.")
    width = _whole("Pixels.")
    height = _whole("Pixels.")
    seed = _whole("Makes this output again, alone.")
    bytes = _whole("Size of the file.")
    num_frames = _whole("Frames of a video.", allow_none=True)
    fps = _number("Frames in a second of a video.", allow_none=True)
    expires_at = _number("When it is removed.", allow_none=True)


class FailureSchema(Schema):
    """Why a request ended without outputs."""

    code = _text("Stable word for programs.")
    message = _text("For people.")
    retryable = fields.Boolean(metadata={"description": "Whether the same request may succeed."})


class LinksSchema(Schema):
    """Paths of the calls about a request."""

    get = _text("The request.")
    cancel = _text("Where to POST to cancel it.")
    events = _text("Its events, as a stream.")


class WebhookObjectSchema(Schema):
    """Where a client is told of what, and whether it was told of the end."""

    url = _text("Address.")
    events = fields.List(fields.String(), metadata={"description": "Of what it is told."})
    tries = _whole("How often the end was tried to be told.")
    delivered_at = _number("When it was.", allow_none=True)
    error = _text("Why the last try failed.", allow_none=True)


class RequestObjectSchema(Schema):
    """A request. Times are seconds since the epoch."""

    id = _text("Its id.")
    object = _text("Always `request`.")
    status = _one_of(Status, "Where it stands; `running` only once a replica has claimed it.")
    model = _text("Which model.")
    task = _text("What the pipeline does.")
    replica = _text("The replica that has it.")
    attempt = _whole("1, and one more after each move to another replica.")
    priority = _one_of(Priority, "Its class in the line.")
    affinity_key = _text(
        "Requests of one key go to one replica, as far as they can.", allow_none=True
    )
    queue_position = _whole("1 for the next; null unless queued.", allow_none=True)
    progress = fields.Nested(ProgressSchema)
    created_at = _number("When it was accepted.")
    started_at = _number("When a replica claimed it.", allow_none=True)
    finished_at = _number("When it ended.", allow_none=True)
    start_by = _number("When it expires unless it has started.", allow_none=True)
    timeout = _number("Seconds it may run.", allow_none=True)
    timings = fields.Nested(TimingsSchema)
    parameters = fields.Nested(ParametersSchema)
    outputs = fields.List(fields.Nested(OutputObjectSchema))
    warnings = fields.List(fields.String())
    error = fields.Nested(FailureSchema, allow_none=True)
    metadata = fields.Dict(keys=fields.String(), values=fields.String())
    webhook = fields.Nested(WebhookObjectSchema, allow_none=True)
    urls = fields.Nested(LinksSchema)


class ReplicaObjectSchema(Schema):
    """A replica: one process with its own model and devices."""

    name = _text("Its name, and that of its queue.")
    object = _text("Always `replica`.")
    state = _one_of(ReplicaState, "Only `ready` ones are in the rotation.")
    model = _text("The model it serves.")
    stage = _whole("Its stage.")
    host = _text("Where it runs.")
    pid = _whole("Its process.")
    devices = fields.List(fields.Integer(), metadata={"description": "Its device chunk."})
    device_kind = _text("`cuda` or `cpu`.")
    capacity = _whole("Requests that may share a step.")
    running = _whole("Requests it has claimed.")
    waiting = _whole("Requests in its line.")
    seconds_per_step = _number("Moving mean; null before the first step.", allow_none=True)
    completed = _whole("Requests that succeeded there.")
    failed = _whole("Requests that failed there.")
    restarts = _whole("Processes it has had before this one.")
    started_at = _number("When its process started.")
    last_heartbeat_at = _number("When it was last heard of.")
    memory_bytes = _whole("Memory of its process.", allow_none=True)
    device_memory_bytes = _whole("Device memory it holds.", allow_none=True)
    error = _text("Why it failed, or why its last start did.", allow_none=True)


class TakesSchema(Schema):
    """Which parameters the pipeline takes."""

    negative_prompt = fields.Boolean()
    guidance_scale = fields.Boolean()
    true_cfg_scale = fields.Boolean()
    image = fields.Boolean()
    mask_image = fields.Boolean()
    strength = fields.Boolean()
    num_frames = fields.Boolean()
    fps = fields.Boolean()
    preview = fields.Boolean()


class LimitsSchema(Schema):
    """The largest value of each parameter."""

    max_pixels = _whole("Width x height of one output.")
    num_inference_steps = _whole("Denoising steps.")
    num_outputs_per_prompt = _whole("Outputs of one request.")
    images = _whole("Input images of one request.")
    num_frames = _whole("Frames of a video.", allow_none=True)
    video_pixels = _whole("Width x height x frames of a video.", allow_none=True)
    prompt_characters = _whole("Longer prompts are refused.")
    prompt_tokens = _whole("Longer prompts are cut, with a warning.", allow_none=True)
    seed = _whole("Seed of the last output.")


class ModelObjectSchema(Schema):
    """A model, as OpenAI lists it, with what it can do."""

    id = _text("Its name.")
    object = _text("Always `model`.")
    created = _whole("When the oldest of its replicas started; 0 where none lives.")
    owned_by = _text("This service.")
    ready_replicas = _whole("Replicas in the rotation.")
    tasks = fields.List(fields.String())
    size_multiple = _whole("Width and height are multiples of it.")
    frames_step = _whole("A video has 1 frame and a multiple of it more.", allow_none=True)
    schedulers = fields.List(fields.String())
    loras = fields.List(fields.String(), metadata={"description": "Adapters to name in `lora`."})
    output_formats = fields.List(fields.String())
    takes = fields.Nested(TakesSchema)
    limits = fields.Nested(LimitsSchema)
    defaults = fields.Dict(
        keys=fields.String(), metadata={"description": "Values of what a request leaves out."}
    )


class _ListSchema(Schema):
    object = _text("Always `list`.")
    has_more = fields.Boolean(metadata={"description": "Whether there is a next page."})


class RequestListSchema(_ListSchema):
    """Requests, the newest first."""

    data = fields.List(fields.Nested(RequestObjectSchema))


class ReplicaListSchema(_ListSchema):
    """Replicas, by number."""

    data = fields.List(fields.Nested(ReplicaObjectSchema))


class ModelListSchema(_ListSchema):
    """Models, by name."""

    data = fields.List(fields.Nested(ModelObjectSchema))


class HealthSchema(Schema):
    """The door is up."""

    status = _text("Always `ok`.")


class StageReadinessSchema(Schema):
    """A stage that can serve."""

    stage = _whole("Its number.")
    model = _text("Its model.")
    ready_replicas = _whole("At least 1.")


class ReadinessSchema(Schema):
    """Every stage can serve."""

    status = _text("Always `ready`.")
    stages = fields.List(fields.Nested(StageReadinessSchema))


class FieldErrorSchema(Schema):
    """One wrong field."""

    param = _text("Path of the field.")
    message = _text("What is wrong, and how to mend it.")
    code = _text("Stable word for programs.")


class ErrorSchema(Schema):
    """What went wrong."""

    message = _text("For people.")
    type = _text("`invalid_request_error`, `rate_limit_error` or `server_error`.")
    param = _text("The field or header that is wrong.", allow_none=True)
    code = _text("Stable word for programs.")
    details = fields.List(fields.Nested(FieldErrorSchema))


class ErrorAnswerSchema(Schema):
    """The one shape of all errors."""

    error = fields.Nested(ErrorSchema)
