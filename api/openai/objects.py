"""What OpenAI's calls answer: schemas, and what a request cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

from marshmallow import Schema, fields
from redis.exceptions import RedisError

from api.http.fields import number, text, texts, whole
from routing.replica import Registry
from routing.request import Request

_DIGITS: Final = 6
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Measurements:
    """Durations of one request and the memory of its replica.

    Attributes:
        stage_durations: Seconds by part: `queued`, `encode`, `denoise`, `decode`.
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
        }
        durations = {
            name: round(max(0.0, value), _DIGITS)
            for name, value in seconds.items()
            if value is not None
        }
        ended = request.finished_at
        total_s = 0.0 if ended is None else round(max(0.0, ended - request.created_at), _DIGITS)
        return cls(durations, total_s, _memory_mb(request, registry))

    def to_json(self) -> dict[str, Any]:
        """Return them as `metrics` shows them."""
        return {
            "stage_durations": self.stage_durations,
            "total_s": self.total_s,
            "peak_memory_mb": self.peak_memory_mb,
        }


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


def _durations() -> fields.Dict:
    return fields.Dict(
        keys=fields.String(),
        values=fields.Float(),
        metadata={"description": "Seconds by part of the run."},
    )


def _memory() -> fields.Float:
    return number("MiB that the replica holds on its devices; on CPU its process.")


class MetricsSchema(Schema):
    """What a request cost."""

    stage_durations = _durations()
    total_s = number("Seconds from submit to end.")
    peak_memory_mb = _memory()


class TokenDetailsSchema(Schema):
    """Always 0."""

    image_tokens = whole("Not counted.")
    text_tokens = whole("Not counted.")


class ImagesUsageSchema(Schema):
    """Tokens are not counted here; the fields are there for clients that read them."""

    input_tokens = whole("Not counted.")
    input_tokens_details = fields.Nested(TokenDetailsSchema)
    output_tokens = whole("Not counted.")
    total_tokens = whole("Not counted.")
    peak_memory_mb = _memory()


class ImageDataSchema(Schema):
    """One picture."""

    b64_json = text("The file in base64; null where its address was asked for.", allow_none=True)
    url = text("Its address; null where the file itself was asked for.", allow_none=True)
    revised_prompt = text("Always null: prompts are used as they are.", allow_none=True)
    seed = whole("Makes this picture again, alone.")


class ImagesAnswerSchema(Schema):
    """Pictures."""

    id = text("Id of the native request.")
    created = whole("When they were done, seconds since the epoch.")
    model = text("Which model made them.")
    data = fields.List(fields.Nested(ImageDataSchema))
    output_format = text("Their file format.")
    size = text("Their width x height in pixels.")
    usage = fields.Nested(ImagesUsageSchema)
    metrics = fields.Nested(MetricsSchema)
    stage_durations = _durations()
    peak_memory_mb = _memory()
    warnings = texts("What was ignored, one sentence each.")


class UrlSchema(Schema):
    """An address."""

    url = text("The file as a data URL.")


class PartSchema(Schema):
    """One output as a part of a message: `image_url` or `video_url`, by its type."""

    type = text("`image_url` or `video_url`.")
    image_url = fields.Nested(UrlSchema)
    video_url = fields.Nested(UrlSchema)
    seed = whole("Makes this output again, alone.")
    stage_durations = _durations()
    peak_memory_mb = _memory()


class MessageSchema(Schema):
    """The answer of the model."""

    role = text("Always `assistant`.")
    content = fields.List(fields.Nested(PartSchema))


class ChoiceSchema(Schema):
    """The only choice."""

    index = whole("Always 0.")
    message = fields.Nested(MessageSchema)
    finish_reason = text("Always `stop`.")


class ChatUsageSchema(Schema):
    """Words of the prompt stand for tokens, which are not counted here."""

    prompt_tokens = whole("Words of the prompt.")
    completion_tokens = whole("Outputs.")
    total_tokens = whole("Both together.")
    peak_memory_mb = _memory()


class ChatAnswerSchema(Schema):
    """An answer whose content are pictures or videos."""

    id = text("Id of the native request.")
    object = text("Always `chat.completion`.")
    created = whole("When it was done, seconds since the epoch.")
    model = text("Which model.")
    choices = fields.List(fields.Nested(ChoiceSchema))
    usage = fields.Nested(ChatUsageSchema)
    metrics = fields.Nested(MetricsSchema)
    stage_durations = _durations()
    peak_memory_mb = _memory()
    warnings = texts("What was ignored, one sentence each.")


class VideoErrorSchema(Schema):
    """Why there is no video."""

    code = text("Stable word for programs.")
    message = text("For people.")


class VideoSchema(Schema):
    """A video, made or in the making."""

    id = text("Id of the native request.")
    object = text("Always `video`.")
    model = text("Which model.")
    prompt = text("What it shows.")
    status = text("`queued`, `in_progress`, `completed` or `failed`.")
    progress = whole("Percent of the denoising steps; 100 when it is there.")
    size = text("Width x height in pixels.")
    seconds = text("How long it is.", allow_none=True)
    quality = text("Always `default`.")
    created_at = whole("Seconds since the epoch.")
    completed_at = whole("When it was done.", allow_none=True)
    expires_at = whole("When it is removed.", allow_none=True)
    error = fields.Nested(VideoErrorSchema, allow_none=True)
    remixed_from_video_id = text("Always null.", allow_none=True)
    media_type = text("Media type of the file.")
    file_name = text("A name for the file.")
    fps = number("Frames in a second.", allow_none=True)
    num_frames = whole("Frames.", allow_none=True)
    duration_s = number("Its length in seconds.", allow_none=True)
    inference_time_s = number("Seconds from start to end.", allow_none=True)
    stage_durations = _durations()
    peak_memory_mb = _memory()
    metrics = fields.Nested(MetricsSchema)
    warnings = texts("What was ignored, one sentence each.")


class VideoListSchema(Schema):
    """Videos."""

    object = text("Always `list`.")
    data = fields.List(fields.Nested(VideoSchema))
    first_id = text("Id of the first one.", allow_none=True)
    last_id = text("Id of the last one.", allow_none=True)
    has_more = fields.Boolean(metadata={"description": "Whether there is a next page."})


class VideoDeletedSchema(Schema):
    """A video that is gone."""

    id = text("Its id.")
    object = text("Always `video.deleted`.")
    deleted = fields.Boolean(metadata={"description": "Always true."})
