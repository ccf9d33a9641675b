"""The call that asks for pictures as a chat and waits for them: `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Final

from flask import Response, g
from flask_smorest import Blueprint
from marshmallow import ValidationError, fields, missing

from api.http.body import JSON, body_content
from api.http.call import idempotency_key
from api.http.fields import (
    AnswerSchema,
    WrongPicture,
    always,
    decode_data_url,
    described,
    nested,
    text,
    texts,
    whole,
)
from api.http.sse import event_response
from api.models.catalog import ServedModel
from api.openai.chat_stream import CHUNK_CONTENT, chunks
from api.openai.fields import OpenAISchema, read_openai_body
from api.openai.images import KEY_OF_HELD_CALL, data_url_of
from api.openai.objects import Answered, Measurements, MetricsSchema, durations, itself, memory
from api.openai.sync import awaited
from api.openai.tolerance import IgnoredField
from api.service import Service
from configs.errors import FieldError
from configs.fields import Flag, Number
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
    "stream_options",
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
    stream = Flag(
        metadata=described(
            "Answer with chunks, of which one brings the pictures as Markdown.", default=False
        )
    )

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Take prompt and pictures out of the messages."""
        conversation = given.pop("messages", None)
        if conversation is not None:
            given["prompt"] = conversation.prompt
            if conversation.images:
                given["image"] = conversation.images
        return super().adapt(given, model)


_CHAT: Final = ChatSchema()


@dataclass(frozen=True, slots=True)
class ShownPart:
    """One output of a chat: `type` is `image_url` or `video_url`, `url` a data URL."""

    type: str
    url: str
    seed: int
    measured: Measurements


@dataclass(frozen=True, slots=True)
class ShownChat(Answered):
    """A request that was a chat, and its outputs."""

    parts: Sequence[ShownPart]


def _words(chat: ShownChat) -> int:
    return len(chat.request.parameters.prompt.split())


class UrlSchema(AnswerSchema):
    """An address."""

    url = text("The file as a data URL.")


def _address(kind: str) -> fields.Field[Any]:
    return nested(UrlSchema, lambda part: part if part.type == kind else missing)


class PartSchema(AnswerSchema):
    """One output as a part of a message: `image_url` or `video_url`, by its type."""

    type = text("`image_url` or `video_url`.")
    image_url = _address("image_url")
    video_url = _address("video_url")
    seed = whole("Makes this output again, alone.")
    stage_durations = durations()
    peak_memory_mb = memory()


class MessageSchema(AnswerSchema):
    """The answer of the model."""

    role = always("assistant")
    content = nested(PartSchema, attrgetter("parts"), many=True)


class ChoiceSchema(AnswerSchema):
    """The only choice."""

    index = whole("Always 0.", lambda _: 0)
    message = nested(MessageSchema, itself)
    finish_reason = always("stop")


class ChatUsageSchema(AnswerSchema):
    """Words of the prompt stand for tokens, which are not counted here."""

    prompt_tokens = whole("Words of the prompt.", _words)
    completion_tokens = whole("Outputs.", lambda chat: len(chat.parts))
    total_tokens = whole("Both together.", lambda chat: _words(chat) + len(chat.parts))
    peak_memory_mb = memory()


class ChatAnswerSchema(AnswerSchema):
    """An answer whose content are pictures or videos."""

    id = text("Id of the native request.", attrgetter("request.id"))
    object = always("chat.completion")
    created = whole("When it was done, seconds since the epoch.")
    model = text("Which model.", attrgetter("request.model"))
    choices = nested(ChoiceSchema, lambda chat: [chat], many=True)
    usage = nested(ChatUsageSchema, itself)
    metrics = nested(MetricsSchema, attrgetter("measured"))
    stage_durations = durations()
    peak_memory_mb = memory()
    warnings = texts("What was ignored, one sentence each.")


# What the chunks of a stream have of the answer that is no stream.
_IN_EACH_CHUNK: Final = ChatAnswerSchema(exclude=("object", "choices"))


blueprint = Blueprint("chat", __name__, description="Pictures and videos as a chat.")


@blueprint.route("/v1/chat/completions", methods=["POST"])
@blueprint.doc(
    requestBody=body_content(ChatSchema, JSON),
    parameters=[KEY_OF_HELD_CALL],
    responses={200: {"description": "What was made.", "content": CHUNK_CONTENT}},
)
@blueprint.response(200, ChatAnswerSchema)
def completions() -> ShownChat | Response:
    """Make what the user asks for and wait; a client that closes the connection cancels."""
    service: Service = g.service
    key = idempotency_key()
    body = read_openai_body(_CHAT, service.catalog)
    with ExitStack() as stack:
        waiting = stack.enter_context(awaited(service, body, _CHAT, key))
        ignored = _CHAT.ignored(waiting.given)
        if not waiting.given.get("stream"):
            return _answer(service, waiting.until_success(), ignored)
        if waiting.look(0):
            waiting.until_success()  # what has ended already need not be told by a chunk

        def completed(request: Request) -> tuple[str, dict[str, Any]]:
            shown = _answer(service, request, ignored)
            return "\n\n".join(map(_markdown, shown.parts)), _IN_EACH_CHUNK.dump(shown)

        # The request is watched for as long as the client reads, and canceled when it has gone.
        return event_response(chunks(waiting, completed), stack.pop_all().close)


def _markdown(part: ShownPart) -> str:
    mark = "!" if part.type == "image_url" else ""
    return f"{mark}[seed {part.seed}]({part.url})"


def _answer(service: Service, request: Request, ignored: list[str]) -> ShownChat:
    measured = Measurements.of(request, service.registry)
    kind = "video_url" if request.parameters.makes_video else "image_url"
    parts = [
        ShownPart(kind, data_url_of(service, request, index), output.seed, measured)
        for index, output in enumerate(request.outputs)
    ]
    return ShownChat(request, measured, ignored, parts)
