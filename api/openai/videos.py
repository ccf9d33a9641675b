"""The calls that make videos without waiting for them: `/v1/videos` and what is below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, ClassVar, Final

from flask import Response, g
from flask_smorest import Blueprint
from marshmallow import Schema, ValidationError, fields, validate

from api.http.body import body_content
from api.http.call import idempotency_key
from api.http.fields import (
    AnswerSchema,
    ImagesField,
    Page,
    SecondsField,
    always,
    described,
    flag,
    nested,
    number,
    page_size,
    text,
    texts,
    whole,
)
from api.models.catalog import ServedModel
from api.openai.fields import OpenAISchema, read_openai_body
from api.openai.images import KEY_OF_HELD_CALL
from api.openai.objects import Answered, Measurements, MetricsSchema, durations, memory, size_of
from api.requests.files import FILE_ANSWERS, output_response
from api.requests.submit import submit_body
from api.service import Service
from configs.errors import FieldError, InvalidRequest, NotFound
from configs.fields import OneOf
from configs.parameters import MEDIA_TYPES, VIDEO_TASKS
from routing.request import Failure, Request, Status

_DIGITS: Final = 3
_STATUS: Final = {
    Status.QUEUED: "queued",
    Status.RUNNING: "in_progress",
    Status.SUCCEEDED: "completed",
}
_PERCENT: Final = 100
_MAX_SECONDS: Final = 86_400


class DurationField(fields.Field[int]):
    """A whole number of seconds, as text or as a number."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> int:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        digits = isinstance(text, str) and text.isascii() and text.isdigit()
        if not digits or not 1 <= int(text[:9]) <= _MAX_SECONDS:
            raise ValidationError(f"is not a whole number of seconds from 1 to {_MAX_SECONDS}")
        return int(text)


class VideosSchema(OpenAISchema):
    """The body of `POST /v1/videos`, beside all fields of a native request."""

    aliases: ClassVar[Mapping[str, str]] = {
        **OpenAISchema.aliases,
        "seconds": "num_frames",
        "input_reference": "image",
    }
    tasks: ClassVar[frozenset[str]] = VIDEO_TASKS
    product: ClassVar[str] = "videos"

    seconds = DurationField(
        metadata=described(
            "How long it is to be, instead of num_frames; the nearest length that the model makes.",
            example="4",
            anyOf=[{"type": "string"}, {"type": "integer"}],
        )
    )
    input_reference = ImagesField(
        metadata=described(
            "Picture that the video begins with: a file, a data URL, or an object with it as "
            "`image_url`.",
            anyOf=[
                {"type": "string"},
                {"type": "object", "properties": {"image_url": {"type": "string"}}},
            ],
        )
    )

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Make seconds into frames."""
        if "seconds" in given:
            fps = given.get("fps") or model.abilities.default_fps or 1.0
            step = model.abilities.frames_step
            more = max(0, round((given["seconds"] * fps - 1) / step))
            given["seconds"] = 1 + more * step
        return super().adapt(given, model)


_VIDEOS: Final = VideosSchema()


class VideosQuerySchema(Schema):
    """The query of `GET /v1/videos`."""

    after = fields.String(metadata={"description": "Id of the last video of the page before."})
    limit = page_size(0)
    order = OneOf("asc", "desc", load_default="desc", metadata={"description": "By age."})


class ContentQuerySchema(Schema):
    """The query of `GET /v1/videos/{id}/content`."""

    variant = OneOf("video", load_default="video", metadata={"description": "Only the video."})
    index = fields.Integer(
        load_default=0,
        validate=validate.Range(0, error="is below 0"),
        error_messages={"invalid": "is not a whole number"},
        metadata={"description": "Which one, where several were asked for."},
    )


@dataclass(frozen=True, slots=True)
class ShownVideo(Answered):
    """A request that makes a video, whose file is kept for `retention_s` after its end."""

    retention_s: float

    @property
    def status(self) -> str:
        """Where it stands, in OpenAI's words."""
        return _STATUS.get(self.request.status, "failed")

    @property
    def progress(self) -> int:
        """Whole percents of the denoising steps; 100 is kept for the finished file."""
        request = self.request
        if request.status is Status.SUCCEEDED:
            return _PERCENT
        if not request.steps:
            return 0
        return min(_PERCENT - 1, int(_PERCENT * request.step / request.steps))

    @property
    def fps(self) -> float | None:
        """Frames in a second: of the file, before it is there those that were asked for."""
        request = self.request
        return request.outputs[0].fps if request.outputs else request.parameters.fps

    @property
    def num_frames(self) -> int | None:
        request = self.request
        return request.outputs[0].num_frames if request.outputs else request.parameters.num_frames

    @property
    def duration_s(self) -> float | None:
        frames, fps = self.num_frames, self.fps
        return round(frames / fps, _DIGITS) if frames and fps else None

    @property
    def seconds(self) -> str | None:
        duration_s = self.duration_s
        return None if duration_s is None else f"{duration_s:g}"

    @property
    def completed_at(self) -> float | None:
        return self.request.finished_at if self.request.status is Status.SUCCEEDED else None

    @property
    def expires_at(self) -> float | None:
        ended = self.request.finished_at
        return None if ended is None else ended + self.retention_s

    @property
    def inference_time_s(self) -> float | None:
        begun, ended = self.request.started_at, self.request.finished_at
        return None if begun is None or ended is None else ended - begun

    @property
    def error(self) -> Failure | None:
        status = self.request.status
        if self.request.error is None and status in {Status.CANCELED, Status.EXPIRED}:
            return Failure(status.value, f"The video is {status.value}.")
        return self.request.error


class VideoErrorSchema(AnswerSchema):
    """Why there is no video."""

    code = text("Stable word for programs.")
    message = text("For people.")


class VideoSchema(AnswerSchema):
    """A video, made or in the making."""

    id = text("Id of the native request.", attrgetter("request.id"))
    object = always("video")
    model = text("Which model.", attrgetter("request.model"))
    prompt = text("What it shows.", attrgetter("request.parameters.prompt"))
    status = text("`queued`, `in_progress`, `completed` or `failed`.")
    progress = whole("Percent of the denoising steps; 100 when it is there.")
    size = text("Width x height in pixels.", lambda video: size_of(video.request))
    seconds = text("How long it is.", allow_none=True)
    quality = always("default")
    created_at = whole("Seconds since the epoch.", attrgetter("request.created_at"))
    completed_at = whole("When it was done.", allow_none=True)
    expires_at = whole("When it is removed.", allow_none=True)
    error = nested(VideoErrorSchema, allow_none=True)
    remixed_from_video_id = text("Always null.", lambda _: None, allow_none=True)
    media_type = text(
        "Media type of the file.",
        lambda video: MEDIA_TYPES[video.request.parameters.output_format],
    )
    file_name = text(
        "A name for the file.",
        lambda video: f"{video.request.id}.{video.request.parameters.output_format}",
    )
    fps = number("Frames in a second.", allow_none=True)
    num_frames = whole("Frames.", allow_none=True)
    duration_s = number("Its length in seconds.", allow_none=True)
    inference_time_s = SecondsField("Seconds from start to end.", allow_none=True)
    stage_durations = durations()
    peak_memory_mb = memory()
    metrics = nested(MetricsSchema, attrgetter("measured"))
    warnings = texts("What was ignored, one sentence each.")


class VideoListSchema(AnswerSchema):
    """Videos."""

    object = always("list")
    data = nested(VideoSchema, many=True)
    first_id = text(
        "Id of the first one.",
        lambda page: page.data[0].request.id if page.data else None,
        allow_none=True,
    )
    last_id = text(
        "Id of the last one.",
        lambda page: page.data[-1].request.id if page.data else None,
        allow_none=True,
    )
    has_more = flag("Whether there is a next page.")


class VideoDeletedSchema(AnswerSchema):
    """A video that is gone; dumped from its request."""

    id = text("Its id.")
    object = always("video.deleted")
    deleted = flag("Always true.", lambda _: True)


blueprint = Blueprint("videos", __name__, description="Videos by OpenAI's calls.")


@blueprint.route("/v1/videos", methods=["POST"])
@blueprint.doc(requestBody=body_content(VideosSchema), parameters=[KEY_OF_HELD_CALL])
@blueprint.response(200, VideoSchema)
def create() -> ShownVideo:
    """Submit a video; it goes on whether its client stays or not."""
    service: Service = g.service
    key = idempotency_key()
    body = read_openai_body(_VIDEOS, service.catalog)
    accepted, given = submit_body(service, body, key=key, schema=_VIDEOS)
    return _shown(service, accepted.request, _VIDEOS.ignored(given))


@blueprint.route("/v1/videos", methods=["GET"])
@blueprint.arguments(VideosQuerySchema, location="query", unknown="raise")
@blueprint.response(200, VideoListSchema)
def listed(query: dict[str, Any]) -> Page:
    """List videos, the newest first or the oldest."""
    service: Service = g.service
    limit = query["limit"]
    found = service.records.of_kind(
        "video",
        query.get("after"),
        oldest_first=query["order"] == "asc",
        at_once=limit + 1,
    )
    page = list(islice(found, limit + 1))
    shown = [_shown(service, request) for request in page[:limit]]
    return Page(shown, has_more=len(page) > limit)


@blueprint.route("/v1/videos/<request_id>", methods=["GET"])
@blueprint.response(200, VideoSchema)
def retrieve(request_id: str) -> ShownVideo:
    """Return a video, made or in the making."""
    service: Service = g.service
    return _shown(service, _video(service, request_id))


@blueprint.route("/v1/videos/<request_id>/content", methods=["GET"])
@blueprint.arguments(ContentQuerySchema, location="query", unknown="raise")
@blueprint.doc(responses=FILE_ANSWERS)
@blueprint.alt_response(206, description="The range of it that was asked for.", success=True)
@blueprint.alt_response(304, description="It is the one whose ETag was sent.", success=True)
@blueprint.alt_response(416, description="The file has no such range.")
def content(query: dict[str, Any], request_id: str) -> Response:
    """Return the file of a video."""
    service: Service = g.service
    request = _video(service, request_id)
    if request.is_terminal and request.status is not Status.SUCCEEDED:
        reason = request.error.message if request.error else f"it is {request.status}"
        raise InvalidRequest(f"There is no video of {request.id}: {reason}", param="id")
    return output_response(service, request, query["index"])


@blueprint.route("/v1/videos/<request_id>", methods=["DELETE"])
@blueprint.response(200, VideoDeletedSchema)
def delete(request_id: str) -> Request:
    """Remove a video, and cancel it first if it is still in the making."""
    service: Service = g.service
    request = _video(service, request_id)
    service.router.remove(request.id)
    return request


def _video(service: Service, request_id: str) -> Request:
    request = service.records.get(request_id)
    if not request.parameters.makes_video:
        raise NotFound(f"Request {request.id} makes no video.", param="id")
    return request


def _shown(service: Service, request: Request, ignored: Sequence[str] = ()) -> ShownVideo:
    measured = Measurements.of(request, service.registry)
    return ShownVideo(request, measured, ignored, service.settings.retention_s)
