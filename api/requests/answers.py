"""The answers about requests: schemas that are dumped from the records.

Times are seconds since the epoch, durations seconds. URLs are paths, so that they hold behind any
proxy.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Final

from marshmallow import fields

from api.http.fields import (
    AnswerSchema,
    ListSchema,
    SecondsField,
    always,
    described,
    flag,
    nested,
    number,
    one_of,
    text,
    texts,
    whole,
)
from configs.fields import Parameter
from configs.parameters import PARAMETERS
from routing.request import Output, Priority, Request, Status


def request_url(request_id: str) -> str:
    """Return the path of a request."""
    return f"/v1/requests/{request_id}"


@dataclass(frozen=True, slots=True)
class ShownProgress:
    """How far a request is; ``eta_s`` are the seconds of the remaining steps, None if unknown."""

    step: int
    steps: int
    fraction: float
    eta_s: float | None

    @classmethod
    def at(cls, step: int, steps: int, step_s: float | None) -> ShownProgress:
        """Return the progress of a run after a step that took `step_s` seconds."""
        eta_s = None if step_s is None else round((steps - step) * step_s, 3)
        return cls(step, steps, round(step / steps, 4) if steps else 0.0, eta_s)


@dataclass(frozen=True, slots=True)
class ShownRequest:
    """A request, and what its record does not say: its place, and how long its files are kept."""

    request: Request
    retention_s: float
    queue_position: int | None = None


@dataclass(frozen=True, slots=True)
class ShownOutput:
    """An output, and what the record does not say of it."""

    output: Output
    url: str
    expires_at: float | None


def shown_outputs(shown: ShownRequest) -> list[ShownOutput]:
    """Return the outputs of a request as they are shown."""
    request = shown.request
    if not request.outputs:
        return []
    ended, url = request.finished_at, request_url(request.id)
    expires_at = None if ended is None else ended + shown.retention_s
    return [
        ShownOutput(output, f"{url}/outputs/{index}", expires_at)
        for index, output in enumerate(request.outputs)
    ]


def shown_progress(request: Request) -> ShownProgress:
    """Return how far a request is."""
    steps = request.steps or request.parameters.num_inference_steps
    runs = request.status is Status.RUNNING and request.steps
    progress = ShownProgress.at(request.step, steps, request.step_s if runs else None)
    if request.status is Status.SUCCEEDED:
        return ShownProgress(progress.step, steps, 1.0, None)
    return progress


def _queued_s(request: Request) -> float | None:
    until = request.started_at or request.finished_at
    return until - request.created_at if until else None


def _total_s(request: Request) -> float | None:
    return request.finished_at - request.created_at if request.finished_at else None


def _image_urls(request: Request) -> list[str]:
    url = request_url(request.id)
    return [f"{url}/inputs/{index}" for index in range(len(request.parameters.image))]


def _mask_url(request: Request) -> str | None:
    if request.parameters.mask_image is None:
        return None
    return f"{request_url(request.id)}/inputs/{len(request.parameters.image)}"


class ProgressSchema(AnswerSchema):
    """How far a request is."""

    step = whole("Denoising steps done.")
    steps = whole("Denoising steps in all.")
    fraction = number("From 0 to 1.")
    eta_s = number("Seconds that the remaining steps will take.", allow_none=True)


class TimingsSchema(AnswerSchema):
    """Seconds spent in each part; null where it was not reached."""

    queued_s = SecondsField("From submit to start.", _queued_s, allow_none=True)
    encode_s = SecondsField(
        "Prompt to embeddings.", attrgetter("timings.encode_s"), allow_none=True
    )
    denoise_s = SecondsField(
        "All denoising steps.", attrgetter("timings.denoise_s"), allow_none=True
    )
    decode_s = SecondsField("Latents to pictures.", attrgetter("timings.decode_s"), allow_none=True)
    store_s = SecondsField(
        "Encoding and writing the files.", attrgetter("timings.store_s"), allow_none=True
    )
    total_s = SecondsField("From submit to end.", _total_s, allow_none=True)
    batch_mean = SecondsField(
        "Mean number of requests that shared a denoiser call with this one.",
        attrgetter("timings.batch_mean"),
        allow_none=True,
    )


class LoraSchema(AnswerSchema):
    """One adapter of a request."""

    name = text("As the model lists it.")
    scale = number("Its weight; 1 is as it was trained.")


def _answer_field(parameter: Parameter) -> fields.Field[Any]:
    about = parameter.about
    if parameter.name == "lora":
        return nested(LoraSchema, many=True, metadata=described("Adapters."))
    if parameter.name == "image":
        return texts("Paths of the input images.", _image_urls)
    if parameter.name == "mask_image":
        return text("Path of the mask.", _mask_url, allow_none=True)
    if parameter.words:
        return one_of(parameter.words, about)
    make: Any = {int: whole, float: number, str: text, bool: flag}[parameter.type]
    field: fields.Field[Any] = make(about, allow_none=parameter.nullable)
    return field


class ParametersSchema(AnswerSchema):
    """All generation parameters, the drawn seed and the defaults too."""

    class Meta:
        include: ClassVar[dict[str, fields.Field[Any]]] = {
            name: _answer_field(parameter) for name, parameter in PARAMETERS.items()
        }

    def get_attribute(self, obj: Request, attr: Any, default: Any) -> Any:
        """Return the value of a field of a request's parameters."""
        return attr(obj) if callable(attr) else getattr(obj.parameters, attr)


class OutputObjectSchema(AnswerSchema):
    """One file of a request."""

    url = text("Path of the file.", attrgetter("url"))
    media_type = text("Its media type.")
    width = whole("Pixels.")
    height = whole("Pixels.")
    seed = whole("Makes this output again, alone.")
    bytes = whole("Size of the file.")
    num_frames = whole("Frames of a video.", allow_none=True)
    fps = number("Frames in a second of a video.", allow_none=True)
    expires_at = SecondsField("When it is removed.", attrgetter("expires_at"), allow_none=True)

    def get_attribute(self, obj: ShownOutput, attr: Any, default: Any) -> Any:
        """Return the value of a field of an output."""
        return attr(obj) if callable(attr) else getattr(obj.output, attr)


class FailureSchema(AnswerSchema):
    """Why a request ended without outputs."""

    code = text("Stable word for programs.")
    message = text("For people.")
    retryable = flag("Whether the same request may succeed.")


class LinksSchema(AnswerSchema):
    """Paths of the calls about a request; dumped from its path."""

    get = text("The request.", str)
    cancel = text("Where to POST to cancel it.", "{}/cancel".format)
    events = text("Its events, as a stream.", "{}/events".format)


class WebhookObjectSchema(AnswerSchema):
    """Where a client is told of what, and whether it was told of the end."""

    url = text("Address.")
    events = texts("Of what it is told.")
    tries = whole("How often the end was tried to be told.")
    delivered_at = SecondsField("When it was.", allow_none=True)
    error = text("Why the last try failed.", lambda webhook: webhook.error or None, allow_none=True)


class RequestObjectSchema(AnswerSchema):
    """A request. Times are seconds since the epoch."""

    id = text("Its id.")
    object = always("request")
    status = one_of(Status, "Where it stands; `running` only once a replica has claimed it.")
    model = text("Which model.")
    task = text("What the pipeline does.", attrgetter("request.parameters.task"))
    replica = text("The replica that has it.")
    attempt = whole("1, and one more after each move to another replica.")
    priority = one_of(Priority, "Its class in the queue.")
    affinity_key = text(
        "Requests of one key go to one replica, as far as they can.",
        lambda shown: shown.request.affinity_key or None,
        allow_none=True,
    )
    client = text(
        "Whose request it is.", lambda shown: shown.request.client or None, allow_none=True
    )
    queue_position = whole(
        "1 for the next; null unless queued.", attrgetter("queue_position"), allow_none=True
    )
    progress = nested(ProgressSchema, lambda shown: shown_progress(shown.request))
    created_at = SecondsField("When it was accepted.")
    started_at = SecondsField("When a replica claimed it.", allow_none=True)
    finished_at = SecondsField("When it ended.", allow_none=True)
    start_by = SecondsField("When it expires unless it has started.", allow_none=True)
    timeout = number("Seconds it may run.", allow_none=True)
    timings = nested(TimingsSchema, attrgetter("request"))
    parameters = nested(ParametersSchema, attrgetter("request"))
    outputs = nested(OutputObjectSchema, shown_outputs, many=True)
    warnings = texts()
    error = nested(FailureSchema, allow_none=True)
    metadata = fields.Dict(keys=fields.String(), values=fields.String())
    webhook = nested(WebhookObjectSchema, allow_none=True)
    urls = nested(LinksSchema, lambda shown: request_url(shown.request.id))

    def get_attribute(self, obj: ShownRequest, attr: Any, default: Any) -> Any:
        """Return the value of a field of a request."""
        return attr(obj) if callable(attr) else getattr(obj.request, attr)


class RequestListSchema(ListSchema):
    """Requests, the newest first."""

    data = nested(RequestObjectSchema, many=True)


REQUEST: Final = RequestObjectSchema()
OUTPUT: Final = OutputObjectSchema()
PROGRESS: Final = ProgressSchema()
