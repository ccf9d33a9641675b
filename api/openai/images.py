"""The calls that make pictures and wait: `/v1/images/generations` and `/v1/images/edits`."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, Final

from flask import Response, g
from flask import request as call
from flask_smorest import Blueprint

from api.auth import signed
from api.http.body import JSON, body_content
from api.http.call import idempotency_key, key_parameter
from api.http.fields import ImageField, ImagesField, described
from api.http.sse import EVENT_CONTENT, event_response
from api.models.catalog import ServedModel
from api.openai.fields import OpenAISchema, read_openai_body
from api.openai.image_stream import ImageStream
from api.openai.objects import ImagesAnswerSchema, Measurements, ShownImage, ShownImages
from api.openai.sync import AwaitedRequest, awaited
from api.requests.answers import request_url
from api.requests.checks import shown
from api.requests.schema import IMAGE_FORMS
from api.service import Service
from configs.errors import FieldError, NotFound
from configs.fields import Flag, OneOf, Whole
from configs.parameters import IMAGE_TASKS
from configs.settings import Settings
from routing.request import Request

BASE64: Final = "b64_json"
URL: Final = "url"
_MOST_PARTIAL_IMAGES: Final = 3


def partial_images_field() -> Whole:
    """Return the field that asks a stream for previews."""
    return Whole(
        metadata=described(
            "How many previews the stream brings at most, spread evenly over the steps.",
            minimum=0,
            maximum=_MOST_PARTIAL_IMAGES,
            default=0,
        )
    )


class GenerationsSchema(OpenAISchema):
    """The body of `POST /v1/images/generations`, beside all fields of a native request."""

    tasks: ClassVar[frozenset[str]] = IMAGE_TASKS
    product: ClassVar[str] = "pictures"
    event_kind: ClassVar[str] = "image_generation"

    response_format = OneOf(
        BASE64, URL, metadata=described("How the pictures are answered.", default=BASE64)
    )
    background = OneOf("auto", "opaque", metadata=described("Pictures are opaque here."))
    stream = Flag(
        metadata=described(
            "Answer with events, the last of which brings the picture.", default=False
        )
    )
    partial_images = partial_images_field()

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Ask for the previews that the stream is to bring, where the model can show any."""
        details = super().adapt(given, model) + _wrong_stream(given)
        if given.get("partial_images") and model.abilities.preview:
            given["preview"] = True
        return details

    def ignored(self, given: Mapping[str, Any]) -> list[str]:
        """Return one sentence for each field that had no meaning."""
        return [*super().ignored(given), *lost_previews(given)]


class EditsSchema(GenerationsSchema):
    """The body of `POST /v1/images/edits`, beside all fields of a native request."""

    aliases: ClassVar[Mapping[str, str]] = {
        **GenerationsSchema.aliases,
        "mask": "mask_image",
        "url": "image",
    }
    event_kind: ClassVar[str] = "image_edit"

    image = ImagesField(
        metadata=described(
            "Picture to edit, or several: files named `image` or `image[]`, or data URLs.",
            anyOf=IMAGE_FORMS,
        )
    )
    url = ImagesField(
        metadata=described("The same as `image`, as data URLs.", anyOf=IMAGE_FORMS),
    )
    images = ImagesField(
        metadata=described(
            "The same as image, in JSON: objects with a data URL as `image_url`.",
            type="array",
            items={"type": "object", "properties": {"image_url": {"type": "string"}}},
        )
    )
    mask = ImageField(
        metadata=described("What to paint anew is transparent or white in it.", type="string"),
    )

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Ask for a picture: without one there is nothing to edit."""
        if "images" in given:
            pictures = given.pop("images")
            if "image" in given:
                return [FieldError("images", "stands beside image; keep one of the two")]
            given["image"] = pictures
        details = super().adapt(given, model)
        if not given.get("image") and not details:
            details.append(FieldError("image", "is missing; send the picture to edit", "missing"))
        return details


_GENERATIONS: Final = GenerationsSchema()
_EDITS: Final = EditsSchema()


def lost_previews(given: Mapping[str, Any]) -> list[str]:
    """Return the sentence for previews that the model cannot show."""
    if given.get("partial_images") and not given.get("preview"):
        return ["partial_images was ignored: this model cannot show previews"]
    return []


def wrong_previews(given: Mapping[str, Any]) -> list[FieldError]:
    """Return what is wrong with the previews that a stream is to bring."""
    details = []
    wanted, streams = given.get("partial_images", 0), given.get("stream", False)
    if not 0 <= wanted <= _MOST_PARTIAL_IMAGES:
        reason = f"{shown(wanted)} is not from 0 to {_MOST_PARTIAL_IMAGES}"
        details.append(FieldError("partial_images", reason))
    elif wanted and not streams:
        details.append(FieldError("partial_images", 'needs "stream": true'))
    if wanted and given.get("preview") is False:
        details.append(
            FieldError(
                "preview", "is false but partial_images asks for previews; leave one of them out"
            )
        )
    return details


def _wrong_stream(given: Mapping[str, Any]) -> list[FieldError]:
    details = wrong_previews(given)
    if given.get("stream") and given.get("response_format") == URL:
        reason = f"is {URL} but a stream brings the pictures themselves; leave it out"
        details.append(FieldError("response_format", reason))
    return details


def base64_of(service: Service, request: Request, index: int) -> str:
    """Return the file of output `index` in base64.

    Raises:
        NotFound: Its client removed it meanwhile.
    """
    try:
        data = service.outputs.read(request.outputs[index].name)
    except FileNotFoundError:
        raise NotFound(f"The outputs of request {request.id} were removed.") from None
    return base64.b64encode(data).decode()


def data_url_of(service: Service, request: Request, index: int) -> str:
    """Return the file of output `index` as a data URL.

    Raises:
        NotFound: Its client removed it meanwhile.
    """
    media_type = request.outputs[index].media_type
    return f"data:{media_type};base64,{base64_of(service, request, index)}"


def absolute_url(request: Request, index: int, settings: Settings) -> str:
    """Return where output `index` can be fetched, with the host that the client called.

    Where the service asks for a key, the address is signed, and opens without it for a while.
    """
    path = signed(f"{request_url(request.id)}/outputs/{index}", settings)
    return f"{call.host_url.rstrip('/')}{path}"


KEY_OF_HELD_CALL: Final = key_parameter(", which a client that goes does not cancel")
_QUALITIES: Final = frozenset({"low", "medium", "high", "xhigh", "max"})


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
    parameters=[KEY_OF_HELD_CALL],
    responses=_STREAM,
)
@blueprint.response(200, ImagesAnswerSchema)
def generations() -> ShownImages | Response:
    """Make pictures and wait for them; a client that closes the connection cancels."""
    return _answered(_GENERATIONS)


@blueprint.route("/v1/images/edits", methods=["POST"])
@blueprint.doc(
    requestBody=body_content(EditsSchema), parameters=[KEY_OF_HELD_CALL], responses=_STREAM
)
@blueprint.response(200, ImagesAnswerSchema)
def edits() -> ShownImages | Response:
    """Edit a picture, or the part of it under a mask, and wait for it."""
    return _answered(_EDITS)


def _answered(schema: GenerationsSchema) -> ShownImages | Response:
    service: Service = g.service
    key = idempotency_key()
    body = read_openai_body(schema, service.catalog)
    only_end = not body.get("partial_images")
    with ExitStack() as stack:
        waiting = stack.enter_context(awaited(service, body, schema, key, only_end=only_end))
        given, ignored = waiting.given, schema.ignored(waiting.given)
        if given.get("stream"):
            if waiting.look(0):
                waiting.until_success()  # what has ended already need not be told by an event
            events = _stream(waiting, schema.event_kind, ignored)
            # The request is watched for as long as the client reads, and canceled when it has gone.
            return event_response(events.text(), stack.pop_all().close)
        return _answer(service, waiting.until_success(), given, ignored)


def _stream(waiting: AwaitedRequest, kind: str, ignored: list[str]) -> ImageStream:
    given = waiting.given
    quality = given.get("quality")
    if not isinstance(quality, str) or quality not in _QUALITIES:
        quality = "auto"
    return ImageStream(
        waiting,
        kind,
        given.get("partial_images", 0),
        quality,
        lambda request: _answer(waiting.service, request, given, ignored),
    )


def _answer(
    service: Service, request: Request, given: Mapping[str, Any], ignored: list[str]
) -> ShownImages:
    as_url = given.get("response_format") == URL
    data = [
        ShownImage(
            output.seed,
            None if as_url else base64_of(service, request, index),
            absolute_url(request, index, service.settings) if as_url else None,
        )
        for index, output in enumerate(request.outputs)
    ]
    return ShownImages(request, Measurements.of(request, service.registry), ignored, data)
