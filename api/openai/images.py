"""The calls that make pictures and wait for them: `/v1/images/generations` and `/v1/images/edits`.

Does not know how a request is run, nor how its client is watched (`api/awaited_request.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from flask_smorest import Blueprint

from api.awaited_request import awaited
from api.body_fields import ImageField, ImagesField, described
from api.call_body import body_content
from api.call_headers import IDEMPOTENCY_KEY, idempotency_key
from api.catalog import ServedModel
from api.json_body import JSON
from api.openai.fields import IgnoredField, OpenAISchema, read_openai_body
from api.openai.measurements import Measurements
from api.openai.objects import ImagesAnswerSchema
from api.openai.pictures import absolute_url, base64_of
from api.service import Service, current_service
from configs.errors import FieldError
from configs.field_types import OneOf
from routing.parameters import IMAGE_TASKS
from routing.record import Request

BASE64: Final = "b64_json"
URL: Final = "url"
KEY_PARAMETER: Final = {
    "in": "header",
    "name": IDEMPOTENCY_KEY,
    "schema": {"type": "string", "maxLength": 255},
    "description": "A name of your own: the same one with the same body makes one request, which "
    "a client that goes does not cancel.",
}
_DATA_URL: Final = {"type": "string"}

blueprint = Blueprint("images", __name__, description="Pictures by OpenAI's calls.")


class GenerationsSchema(OpenAISchema):
    """What `POST /v1/images/generations` takes, beside all fields of a native request."""

    tasks: ClassVar[frozenset[str]] = IMAGE_TASKS
    product: ClassVar[str] = "pictures"

    response_format = OneOf(
        BASE64, URL, metadata=described("How the pictures are answered.", default=BASE64)
    )
    background = OneOf("auto", "opaque", metadata=described("Pictures are opaque here."))


class EditsSchema(GenerationsSchema):
    """What `POST /v1/images/edits` takes, beside all fields of a native request."""

    aliases: ClassVar[Mapping[str, str]] = {**GenerationsSchema.aliases, "mask": "mask_image"}

    image = ImagesField(
        metadata=described(
            "Picture to edit, or several: files named `image` or `image[]`, or data URLs.",
            anyOf=[_DATA_URL, {"type": "array", "items": _DATA_URL, "minItems": 1}],
        )
    )
    mask = ImageField(
        metadata=described("What to paint anew is transparent or white in it.", **_DATA_URL),
    )
    input_fidelity = IgnoredField()
    bot_task = IgnoredField()
    sys_type = IgnoredField()
    system_prompt = IgnoredField()

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Ask for a picture: without one there is nothing to edit."""
        details = super().adapt(given, model)
        if not given.get("image") and not details:
            details.append(FieldError("image", "is missing; send the picture to edit", "missing"))
        return details


@blueprint.route("/v1/images/generations", methods=["POST"])
@blueprint.doc(requestBody=body_content(GenerationsSchema, JSON), parameters=[KEY_PARAMETER])
@blueprint.response(200, ImagesAnswerSchema)
def generations() -> dict[str, Any]:
    """Make pictures and wait for them; a client that closes the connection cancels."""
    return _answered(GenerationsSchema())


@blueprint.route("/v1/images/edits", methods=["POST"])
@blueprint.doc(requestBody=body_content(EditsSchema), parameters=[KEY_PARAMETER])
@blueprint.response(200, ImagesAnswerSchema)
def edits() -> dict[str, Any]:
    """Edit a picture, or the part of it under a mask, and wait for it."""
    return _answered(EditsSchema())


def _answered(schema: GenerationsSchema) -> dict[str, Any]:
    service = current_service()
    key = idempotency_key()
    body = read_openai_body(schema, service.catalog)
    with awaited(service, body, schema, key) as waiting:
        request = waiting.until_success()
    return _answer(service, request, waiting.given, schema.left_aside(waiting.given))


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
        "size": f"{parameters.width}x{parameters.height}",
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
