"""The calls that make pictures and wait for them: `/v1/images/generations` and `/v1/images/edits`.

With `stream` they are told by events as they come (`api/openai/image_stream.py`).

Does not know how a request is run, nor how its client is watched (`api/awaited_request.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final

from flask import Response
from flask_smorest import Blueprint

from api.awaited_request import AwaitedRequest, awaited
from api.call_body import body_content
from api.call_headers import IDEMPOTENCY_KEY, idempotency_key
from api.event_stream import EVENT_CONTENT, event_response
from api.json_body import JSON
from api.openai.fields import read_openai_body
from api.openai.image_fields import URL, EditsSchema, GenerationsSchema
from api.openai.image_stream import ImageStream, size_of
from api.openai.measurements import Measurements
from api.openai.objects import ImagesAnswerSchema
from api.openai.pictures import absolute_url, base64_of
from api.service import Service, current_service
from routing.record import Request

KEY_PARAMETER: Final = {
    "in": "header",
    "name": IDEMPOTENCY_KEY,
    "schema": {"type": "string", "maxLength": 255},
    "description": "A name of your own: the same one with the same body makes one request, which "
    "a client that goes does not cancel.",
}
_QUALITIES: Final = frozenset({"low", "medium", "high", "xhigh", "max"})
# What an event of a finished picture has of the answer that is no stream.
_OF_ANSWER: Final = (
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
_STREAM: Final = {
    200: {
        "description": "The pictures; with `stream` events `partial_image` and `completed`, whose "
        "names begin with `image_generation.` or `image_edit.`, or an event `error`.",
        "content": EVENT_CONTENT,
    }
}

blueprint = Blueprint("images", __name__, description="Pictures by OpenAI's calls.")


@blueprint.route("/v1/images/generations", methods=["POST"])
@blueprint.doc(
    requestBody=body_content(GenerationsSchema, JSON),
    parameters=[KEY_PARAMETER],
    responses=_STREAM,
)
@blueprint.response(200, ImagesAnswerSchema)
def generations() -> dict[str, Any] | Response:
    """Make pictures and wait for them; a client that closes the connection cancels."""
    return _answered(GenerationsSchema())


@blueprint.route("/v1/images/edits", methods=["POST"])
@blueprint.doc(requestBody=body_content(EditsSchema), parameters=[KEY_PARAMETER], responses=_STREAM)
@blueprint.response(200, ImagesAnswerSchema)
def edits() -> dict[str, Any] | Response:
    """Edit a picture, or the part of it under a mask, and wait for it."""
    return _answered(EditsSchema())


def _answered(schema: GenerationsSchema) -> dict[str, Any] | Response:
    service = current_service()
    key = idempotency_key()
    body = read_openai_body(schema, service.catalog)
    only_end = not body.get("partial_images")
    with ExitStack() as stack:
        waiting = stack.enter_context(awaited(service, body, schema, key, only_end=only_end))
        given, left_aside = waiting.given, schema.left_aside(waiting.given)
        if given.get("stream"):
            if waiting.look(0):
                waiting.until_success()  # what has ended already need not be told by an event
            events = _stream(waiting, schema.event_kind, left_aside)
            # The request is watched for as long as the client reads, and canceled when it has gone.
            return event_response(events.text(), stack.pop_all().close)
        return _answer(service, waiting.until_success(), given, left_aside)


def _stream(waiting: AwaitedRequest, kind: str, left_aside: list[str]) -> ImageStream:
    given = waiting.given
    quality = given.get("quality")
    known = isinstance(quality, str) and quality in _QUALITIES
    described_alike = {"quality": quality if known else "auto", "background": "opaque"}

    def completed(request: Request) -> list[dict[str, Any]]:
        answer = _answer(waiting.service, request, given, left_aside)
        alike = {name: answer[name] for name in _OF_ANSWER}
        return [
            {
                "output_index": index,
                "b64_json": picture["b64_json"],
                "seed": picture["seed"],
                "created_at": answer["created"],
                **alike,
            }
            for index, picture in enumerate(answer["data"])
        ]

    return ImageStream(waiting, kind, given.get("partial_images", 0), described_alike, completed)


def _answer(
    service: Service, request: Request, given: Mapping[str, Any], left_aside: list[str]
) -> dict[str, Any]:
    parameters = request.parameters
    measured = Measurements.of(request, service.router.registry)
    as_url = given.get("response_format") == URL
    return {
        "id": request.id,
        "created": int(request.finished_at or request.created_at),
        "model": request.model,
        "data": [
            {
                "b64_json": None if as_url else base64_of(service, request, index),
                "url": absolute_url(request, index) if as_url else None,
                "revised_prompt": None,
                "seed": output.seed,
            }
            for index, output in enumerate(request.outputs)
        ],
        "output_format": parameters.output_format,
        "size": size_of(request),
        "usage": {
            # Tokens are not what is counted here.
            "input_tokens": 0,
            "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
            "output_tokens": 0,
            "total_tokens": 0,
            "peak_memory_mb": measured.peak_memory_mb,
        },
        "metrics": measured.to_json(),
        "stage_durations": measured.stage_durations,
        "peak_memory_mb": measured.peak_memory_mb,
        "warnings": [*request.warnings, *left_aside],
    }
