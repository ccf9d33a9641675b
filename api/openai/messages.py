"""The messages of a chat, read as what a diffusion request is made of: a prompt and pictures.

Only what the user said counts. Does not know the other fields of a chat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from marshmallow import ValidationError, fields

from api.input_images import WrongPicture, decode_data_url

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
                raise ValidationError({index: ["is no message with a role"]})
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
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                images.append(_decoded(url))
            case {"type": "image_url" | "input_image", "image_url": str(url)}:
                images.append(_decoded(url))
            case {"image": str(data)}:
                images.append(_decoded(_as_data_url(data)))
            case _:
                raise ValidationError(
                    "has a content that is neither text nor an image_url part with a data URL"
                )


def _as_data_url(data: str) -> str:
    return data if data.startswith("data:") else f"data:image/png;base64,{data}"


def _decoded(url: str) -> bytes:
    try:
        return decode_data_url(url)
    except WrongPicture as wrong:
        raise ValidationError(f"has an image that {wrong}") from None
