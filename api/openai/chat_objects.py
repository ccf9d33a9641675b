"""The answer of a chat: outputs as parts of a message, or as Markdown text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from marshmallow import fields, missing, post_dump

from api.http.fields import AnswerSchema, always, described, nested, text, texts, whole
from api.openai.objects import Answered, Measurements, MetricsSchema, durations, itself, memory

PARTS: Final = "parts"
MARKDOWN: Final = "markdown"


@dataclass(frozen=True, slots=True)
class ShownPart:
    """One output of a chat: `type` is `image_url` or `video_url`, `url` a data URL."""

    type: str
    url: str
    seed: int
    measured: Measurements


@dataclass(frozen=True, slots=True)
class ShownChat(Answered):
    """A request that was a chat, its outputs, and how they are shown."""

    parts: Sequence[ShownPart]
    content_format: str


def _markdown(part: ShownPart) -> str:
    # A video cannot be shown in Markdown, only linked.
    mark = "!" if part.type == "image_url" else ""
    return f"{mark}[seed {part.seed}]({part.url})"


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
    content = nested(
        PartSchema,
        attrgetter("parts"),
        many=True,
        metadata=described("With `content_format` `markdown` it is one text with data URLs."),
    )

    @post_dump(pass_original=True)
    def _as_text(self, data: dict[str, Any], shown: ShownChat, **_: Any) -> dict[str, Any]:
        if shown.content_format == MARKDOWN:
            data["content"] = "\n\n".join(map(_markdown, shown.parts))
        return data


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
