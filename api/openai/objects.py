"""What answers of OpenAI's calls share, above all what a request cost; and pictures as answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Self

from marshmallow import fields
from redis.exceptions import RedisError

from api.http.fields import (
    AnswerSchema,
    always,
    nested,
    number,
    text,
    texts,
    whole,
)
from routing.replica import Registry
from routing.request import Request

_DIGITS: Final = 6
_MIB: Final = 1024 * 1024


def size_of(request: Request) -> str:
    """Return width x height in pixels of what a request makes."""
    return f"{request.parameters.width}x{request.parameters.height}"


@dataclass(frozen=True, slots=True)
class Measurements:
    """Durations of one request and the memory of its replica.

    Attributes:
        stage_durations: Seconds by part: `queued`, `encode`, `denoise`, `decode`,
            `store`.
        total_s: Seconds from submit to end; 0 before that.
        peak_memory_mb: MiB that the replica's process holds on its devices, which its allocator
            does not give back between requests; on CPU those of the process. 0 where unknown.
    """

    stage_durations: dict[str, float]
    total_s: float
    peak_memory_mb: float

    @classmethod
    def of(cls, request: Request, registry: Registry) -> Self:
        """Measure a request as far as it got."""
        begun = request.started_at or request.finished_at
        seconds = {
            "queued": None if begun is None else begun - request.created_at,
            "encode": request.timings.encode_s,
            "denoise": request.timings.denoise_s,
            "decode": request.timings.decode_s,
            "store": request.timings.store_s,
        }
        durations = {
            name: round(max(0.0, value), _DIGITS)
            for name, value in seconds.items()
            if value is not None
        }
        ended = request.finished_at
        total_s = 0.0 if ended is None else round(max(0.0, ended - request.created_at), _DIGITS)
        return cls(durations, total_s, _memory_mb(request, registry))


def _memory_mb(request: Request, registry: Registry) -> float:
    try:
        replica = registry.get(request.replica)
    except RedisError:
        # The output is there; a figure beside it is not worth losing it.
        return 0.0
    if replica is None:
        return 0.0
    held = replica.heartbeat.device_memory_bytes or replica.heartbeat.memory_bytes or 0
    return round(held / _MIB, 3)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request, what it cost, and a sentence for each field that had no meaning."""

    request: Request
    measured: Measurements
    ignored: Sequence[str]

    @property
    def warnings(self) -> list[str]:
        """What the client is to know, one sentence each."""
        return [*self.request.warnings, *self.ignored]

    @property
    def created(self) -> int:
        """When it was done, seconds since the epoch."""
        return int(self.request.finished_at or self.request.created_at)


@dataclass(frozen=True, slots=True)
class ShownImage:
    """One picture: its file in base64, or its address."""

    seed: int
    b64_json: str | None
    url: str | None


@dataclass(frozen=True, slots=True)
class ShownImages(Answered):
    """A request that made pictures, and these."""

    data: Sequence[ShownImage]


@dataclass(frozen=True, slots=True)
class ImageEvent:
    """What all events of a stream of pictures tell: their name, and what the client asked for."""

    type: str
    quality: str


@dataclass(frozen=True, slots=True)
class PartialImage(ImageEvent):
    """A preview, the how many-eth it is, and when it was sent."""

    partial_image_index: int
    b64_json: str
    created_at: int
    size: str


@dataclass(frozen=True, slots=True)
class CompletedImage(ImageEvent):
    """A finished picture, and which of the outputs it is."""

    output_index: int
    image: ShownImage
    created_at: int


def durations(of: Any = attrgetter("measured.stage_durations")) -> fields.Dict:
    """Return the field of how long each part took."""
    return fields.Dict(
        keys=fields.String(),
        values=fields.Float(),
        attribute=of,
        metadata={"description": "Seconds by part of the run."},
    )


def memory(of: Any = attrgetter("measured.peak_memory_mb")) -> fields.Float:
    """Return the field of the memory that the replica holds."""
    return number("MiB that the replica holds on its devices; on CPU its process.", of)


def _uncounted() -> fields.Integer:
    return whole("Not counted.", lambda _: 0)


def itself(shown: Any) -> Any:
    """Return what a nested object is dumped from, where that is the outer one."""
    return shown


class MetricsSchema(AnswerSchema):
    """What a request cost."""

    stage_durations = durations(None)
    total_s = number("Seconds from submit to end.")
    peak_memory_mb = memory(None)


class TokenDetailsSchema(AnswerSchema):
    """Always 0."""

    image_tokens = _uncounted()
    text_tokens = _uncounted()


class ImagesUsageSchema(AnswerSchema):
    """Tokens are not counted here; the fields are there for clients that read them."""

    input_tokens = _uncounted()
    input_tokens_details = nested(TokenDetailsSchema, itself)
    output_tokens = _uncounted()
    total_tokens = _uncounted()
    peak_memory_mb = memory()


class ImageDataSchema(AnswerSchema):
    """One picture."""

    b64_json = text("The file in base64; null where its address was asked for.", allow_none=True)
    url = text("Its address; null where the file itself was asked for.", allow_none=True)
    revised_prompt = text(
        "Always null: prompts are used as they are.", lambda _: None, allow_none=True
    )
    seed = whole("Makes this picture again, alone.")


class ImagesAnswerSchema(AnswerSchema):
    """Pictures."""

    id = text("Id of the native request.", attrgetter("request.id"))
    created = whole("When they were done, seconds since the epoch.")
    model = text("Which model made them.", attrgetter("request.model"))
    data = nested(ImageDataSchema, many=True)
    output_format = text("Their file format.", attrgetter("request.parameters.output_format"))
    size = text("Their width x height in pixels.", lambda shown: size_of(shown.request))
    usage = nested(ImagesUsageSchema, itself)
    metrics = nested(MetricsSchema, attrgetter("measured"))
    stage_durations = durations()
    peak_memory_mb = memory()
    warnings = texts("What was ignored, one sentence each.")


class ImageEventSchema(AnswerSchema):
    """What all events of a stream of pictures say."""

    type = text("The event's name.")
    quality = text("The quality that was asked for, or `auto`.")
    background = always("opaque")


class PartialImageSchema(ImageEventSchema):
    """A preview."""

    partial_image_index = whole("0 for the first.")
    b64_json = text("The preview in base64.")
    created_at = whole("When it was sent, seconds since the epoch.")
    size = text("Width x height in pixels of the picture to come.")
    output_format = always("jpeg")


class CompletedImageSchema(ImageEventSchema):
    """A finished picture; what the answer says of all of them comes after this."""

    output_index = whole("0 for the first.")
    b64_json = text("The file in base64.", attrgetter("image.b64_json"))
    seed = whole("Makes this picture again, alone.", attrgetter("image.seed"))
    created_at = whole("When it was done, seconds since the epoch.")


# What an event of a finished picture has of the answer that is no stream.
IN_EACH_EVENT: Final = ImagesAnswerSchema(
    only=(
        "id",
        "model",
        "output_format",
        "size",
        "usage",
        "metrics",
        "stage_durations",
        "peak_memory_mb",
        "warnings",
    )
)
PARTIAL: Final = PartialImageSchema()
COMPLETED: Final = CompletedImageSchema()
