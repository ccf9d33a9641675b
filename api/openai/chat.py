"""The call that asks for pictures as a chat and waits for them: `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from flask import Response, g
from flask_smorest import Blueprint
from marshmallow import ValidationError, fields

from api.http.body import JSON, body_content
from api.http.call import idempotency_key
from api.http.fields import WrongPicture, decode_data_url, described
from api.http.sse import CHUNK_CONTENT, event_response
from api.models.catalog import ServedModel
from api.openai.chat_objects import MARKDOWN, PARTS, ChatAnswerSchema, ShownChat, ShownPart
from api.openai.chat_stream import ChatStream
from api.openai.fields import OpenAISchema, read_openai_body
from api.openai.images import (
    KEY_OF_HELD_CALL,
    data_url_of,
    lost_previews,
    partial_images_field,
    wrong_previews,
)
from api.openai.objects import Measurements
from api.openai.sync import awaited
from api.openai.tolerance import IgnoredField
from api.service import Service
from configs.errors import FieldError
from configs.fields import Flag, Number, OneOf
from configs.parameters import TASKS
from routing.request import Request

_USER: Final = "user"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the user said and showed: the texts joined by spaces, the pictures as bytes."""

    prompt: str
    images: tuple[bytes, ...]


class MessagesField(fields.Field[Conversation]):
    """A list of messages, as a conversation."""

    def _deserialize(self, value: Any, *_: Any, **__: Any) -> Conversation:
        if not isinstance(value, list) or not value:
            raise ValidationError("is not a list of messages")
        texts: list[str] = []
        images: list[bytes] = []
        for index, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValidationError({index: ["is not a message with a role"]})
            if message["role"] == _USER:
                try:
                    _read(message.get("content"), texts, images)
                except ValidationError as wrong:
                    raise ValidationError({index: wrong.messages}) from None
        return Conversation(" ".join(texts), tuple(images))


def _read(content: Any, texts: list[str], images: list[bytes]) -> None:
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        match part:
            case str(text) | {"type": "text" | "input_text", "text": str(text)}:
                texts.append(text)
            case {"text": str(text)} if "type" not in part:
                texts.append(text)
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                images.append(_decoded(url))
            case {"type": "image_url" | "input_image", "image_url": str(url)}:
                images.append(_decoded(url))
            case {"image": str(data)}:
                images.append(_decoded(_as_data_url(data)))
            case _:
                raise ValidationError(
                    "has a content that is not text or an image_url part with a data URL"
                )


def _as_data_url(data: str) -> str:
    return data if data.startswith("data:") else f"data:image/png;base64,{data}"


def _decoded(url: str) -> bytes:
    try:
        return decode_data_url(url)
    except WrongPicture as wrong:
        raise ValidationError(f"has an image that {wrong}") from None


_WITHOUT_A_MEANING: Final = (
    "modalities",
    "response_format",
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "store",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "service_tier",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "reasoning_effort",
    "verbosity",
    "prompt_cache_key",
)


class ChatSchema(OpenAISchema):
    """The body of `POST /v1/chat/completions`; all fields of a native request may stand beside."""

    class Meta(OpenAISchema.Meta):
        """What the messages say is not said again."""

        exclude = ("prompt", "image")
        include: ClassVar[Mapping[str, fields.Field[Any]]] = {
            name: IgnoredField() for name in _WITHOUT_A_MEANING
        }

    tasks: ClassVar[frozenset[str]] = frozenset(TASKS)
    product: ClassVar[str] = "pictures or videos"
    aliases: ClassVar[Mapping[str, str]] = {
        **OpenAISchema.aliases,
        "cfg_scale": "true_cfg_scale",
    }
    words: ClassVar[Mapping[str, str]] = {"prompt": "messages", "image": "messages"}

    messages = MessagesField(
        required=True,
        error_messages={"required": "is missing"},
        metadata=described(
            "Texts of the user's messages are the prompt, their image_url parts (data URLs) the "
            "input images.",
            type="array",
            items={"type": "object"},
            minItems=1,
        ),
    )
    cfg_scale = Number(metadata=described("The same as true_cfg_scale.", minimum=0))
    content_format = OneOf(
        PARTS,
        MARKDOWN,
        metadata=described(
            "The content of the answer: `parts`, a list, or `markdown`, one text with data URLs, "
            "for clients that read text only. A stream brings Markdown unless `parts` are asked "
            "for."
        ),
    )
    stream = Flag(
        metadata=described("Answer with chunks; one at the end brings the outputs.", default=False)
    )
    stream_options = fields.Raw(
        metadata=described("With `include_usage` true the stream ends with the usage.")
    )
    partial_images = partial_images_field()

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Take prompt and pictures out of the messages."""
        conversation = given.pop("messages", None)
        if conversation is not None:
            given["prompt"] = conversation.prompt
            if conversation.images:
                given["image"] = conversation.images
        details = super().adapt(given, model) + wrong_previews(given)
        if given.get("partial_images") and model.abilities.preview:
            given["preview"] = True
        return details

    def ignored(self, given: Mapping[str, Any]) -> list[str]:
        """Return one sentence for each field that had no meaning."""
        return [*super().ignored(given), *lost_previews(given)]


_CHAT: Final = ChatSchema()


blueprint = Blueprint("chat", __name__, description="Pictures and videos as a chat.")


_STREAM: Final = {
    200: {
        "description": "The outputs; with `stream` `chat.completion.chunk` objects and `[DONE]`.",
        "content": CHUNK_CONTENT,
    }
}


@blueprint.route("/v1/chat/completions", methods=["POST"])
@blueprint.doc(
    requestBody=body_content(ChatSchema, JSON), parameters=[KEY_OF_HELD_CALL], responses=_STREAM
)
@blueprint.response(200, ChatAnswerSchema)
def completions() -> ShownChat | Response:
    """Make what the user asks for and wait; a client that closes the connection cancels."""
    service: Service = g.service
    key = idempotency_key()
    body = read_openai_body(_CHAT, service.catalog)
    only_end = not body.get("partial_images")
    with ExitStack() as stack:
        waiting = stack.enter_context(awaited(service, body, _CHAT, key, only_end=only_end))
        given, ignored = waiting.given, _CHAT.ignored(waiting.given)
        if not given.get("stream"):
            form = given.get("content_format", PARTS)
            return _answer(service, waiting.until_success(), ignored, form)
        if waiting.look(0):
            waiting.until_success()  # what has ended already need not be told by an event
        form, options = given.get("content_format", MARKDOWN), given.get("stream_options")
        chunks = ChatStream(
            waiting,
            given.get("partial_images", 0),
            lambda request: _answer(service, request, ignored, form),
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )
        # The request is watched for as long as the client reads, and canceled when it has gone.
        return event_response(chunks.text(), stack.pop_all().close)


def _answer(service: Service, request: Request, ignored: list[str], form: str) -> ShownChat:
    measured = Measurements.of(request, service.registry)
    kind = "video_url" if request.parameters.makes_video else "image_url"
    parts = [
        ShownPart(kind, data_url_of(service, request, index), output.seed, measured)
        for index, output in enumerate(request.outputs)
    ]
    return ShownChat(request, measured, ignored, parts, form)
