"""The calls that make videos without waiting for them: `/v1/videos` and what is below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Final

from flask import Response, g
from flask_smorest import Blueprint
from marshmallow import Schema, ValidationError, fields, validate

from api.http.body import body_content
from api.http.call import idempotency_key
from api.http.fields import ImagesField, described, page_size
from api.models.catalog import ServedModel
from api.openai.fields import OpenAISchema, read_openai_body
from api.openai.images import KEY_OF_HELD_CALL
from api.openai.objects import Measurements, VideoDeletedSchema, VideoListSchema, VideoSchema
from api.requests.files import FILE_ANSWERS, output_response
from api.requests.submit import submit_body
from api.service import Service
from configs.errors import FieldError, InvalidRequest, NotFound
from configs.fields import OneOf
from configs.parameters import MEDIA_TYPES, VIDEO_TASKS
from configs.settings import Settings
from routing.replica import Registry
from routing.request import Request, Status

_STATUS: Final = {
    Status.QUEUED: "queued",
    Status.RUNNING: "in_progress",
    Status.SUCCEEDED: "completed",
}


_FAILED: Final = "failed"
_DIGITS: Final = 3
_PERCENT: Final = 100


def video_object(
    request: Request, registry: Registry, settings: Settings, ignored: Sequence[str]
) -> dict[str, Any]:
    """Return the object; `ignored` are sentences about what has no meaning here."""
    parameters = request.parameters
    measured = Measurements.of(request, registry)
    output = request.outputs[0] if request.outputs else None
    fps = output.fps if output else parameters.fps
    frames = output.num_frames if output else parameters.num_frames
    duration_s = round(frames / fps, _DIGITS) if frames and fps else None
    ended = request.finished_at
    ran = None if ended is None or request.started_at is None else ended - request.started_at
    done = request.status is Status.SUCCEEDED
    form = parameters.output_format
    return {
        "id": request.id,
        "object": "video",
        "model": request.model,
        "prompt": parameters.prompt,
        "status": _STATUS.get(request.status, _FAILED),
        "progress": _PERCENT if done else _progress(request),
        "size": f"{parameters.width}x{parameters.height}",
        "seconds": None if duration_s is None else f"{duration_s:g}",
        "quality": "default",
        "created_at": int(request.created_at),
        "completed_at": int(ended) if ended is not None and done else None,
        "expires_at": int(ended + settings.retention_s) if ended is not None else None,
        "error": _error(request),
        "remixed_from_video_id": None,
        "media_type": MEDIA_TYPES[form],
        "file_name": f"{request.id}.{form}",
        "fps": fps,
        "num_frames": frames,
        "duration_s": duration_s,
        "inference_time_s": None if ran is None else round(ran, _DIGITS),
        "stage_durations": measured.stage_durations,
        "peak_memory_mb": measured.peak_memory_mb,
        "metrics": measured.to_json(),
        "warnings": [*request.warnings, *ignored],
    }


def _progress(request: Request) -> int:
    """Whole percents of the denoising steps; 100 is kept for the finished file."""
    if not request.steps:
        return 0
    return min(_PERCENT - 1, int(_PERCENT * request.step / request.steps))


def _error(request: Request) -> dict[str, str] | None:
    if request.error is not None:
        return {"code": request.error.code, "message": request.error.message}
    if request.status in {Status.CANCELED, Status.EXPIRED}:
        return {"code": request.status.value, "message": f"The video is {request.status.value}."}
    return None


_MAX_SECONDS: Final = 86_400


blueprint = Blueprint("videos", __name__, description="Videos by OpenAI's calls.")


class DurationField(fields.Field[int]):
    """A whole number of seconds, as text or as a number."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> int:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        digits = isinstance(text, str) and text.isascii() and text.isdigit()
        if not digits or not 1 <= int(text[:9]) <= _MAX_SECONDS:
            raise ValidationError(f"is not a whole number of seconds from 1 to {_MAX_SECONDS}")
        return int(text)


class ReferenceField(ImagesField):
    """A picture as everywhere, or as an object with its `image_url`."""

    def _deserialize(self, value: Any, *rest: Any, **options: Any) -> tuple[bytes, ...]:
        if isinstance(value, dict):
            if set(value) != {"image_url"}:
                raise ValidationError('is not an object with just an "image_url"')
            value = value["image_url"]
        return super()._deserialize(value, *rest, **options)


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
    input_reference = ReferenceField(
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


@blueprint.route("/v1/videos", methods=["POST"])
@blueprint.doc(requestBody=body_content(VideosSchema), parameters=[KEY_OF_HELD_CALL])
@blueprint.response(200, VideoSchema)
def create() -> dict[str, Any]:
    """Submit a video; it goes on whether its client stays or not."""
    service: Service = g.service
    key = idempotency_key()
    body = read_openai_body(_VIDEOS, service.catalog)
    accepted, given = submit_body(service, body, key=key, schema=_VIDEOS)
    return _shown(service, accepted.request, _VIDEOS.ignored(given))


@blueprint.route("/v1/videos", methods=["GET"])
@blueprint.arguments(VideosQuerySchema, location="query", unknown="raise")
@blueprint.response(200, VideoListSchema)
def listed(query: dict[str, Any]) -> dict[str, Any]:
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
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(page) > limit,
    }


@blueprint.route("/v1/videos/<request_id>", methods=["GET"])
@blueprint.response(200, VideoSchema)
def retrieve(request_id: str) -> dict[str, Any]:
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
def delete(request_id: str) -> dict[str, Any]:
    """Remove a video, and cancel it first if it is still in the making."""
    service: Service = g.service
    service.router.remove(_video(service, request_id).id)
    return {"id": request_id, "object": "video.deleted", "deleted": True}


def _video(service: Service, request_id: str) -> Request:
    request = service.records.get(request_id)
    if not request.parameters.makes_video:
        raise NotFound(f"Request {request.id} makes no video.", param="id")
    return request


def _shown(service: Service, request: Request, ignored: list[str] | None = None) -> dict[str, Any]:
    return video_object(request, service.registry, service.settings, ignored or [])
