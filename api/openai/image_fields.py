"""The bodies of the calls that make pictures: OpenAI's fields, and what is wrong with them.

Does not know how they are answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from api.body_fields import FlagField, ImageField, ImagesField, WholeField, described
from api.catalog import ServedModel
from api.openai.fields import IgnoredField, OpenAISchema
from api.parameter_checks import shown
from configs.errors import FieldError
from configs.field_types import OneOf
from routing.tasks import IMAGE_TASKS

BASE64: Final = "b64_json"
URL: Final = "url"
_MOST_PARTIAL_IMAGES: Final = 3
_DATA_URL: Final = {"type": "string"}


class GenerationsSchema(OpenAISchema):
    """What `POST /v1/images/generations` takes, beside all fields of a native request."""

    tasks: ClassVar[frozenset[str]] = IMAGE_TASKS
    product: ClassVar[str] = "pictures"
    event_kind: ClassVar[str] = "image_generation"

    response_format = OneOf(
        BASE64, URL, metadata=described("How the pictures are answered.", default=BASE64)
    )
    background = OneOf("auto", "opaque", metadata=described("Pictures are opaque here."))
    stream = FlagField("Answer with events, the last of which brings the picture.", default=False)
    partial_images = WholeField(
        "How many previews the stream brings at most, spread evenly over the steps.",
        minimum=0,
        maximum=_MOST_PARTIAL_IMAGES,
        default=0,
    )

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Ask for the previews that the stream is to bring, where the model can show any."""
        details = super().adapt(given, model) + _wrong_stream(given)
        if given.get("partial_images") and model.abilities.preview:
            given["preview"] = True
        return details

    def left_aside(self, given: Mapping[str, Any]) -> list[str]:
        """Return one sentence for each field that had no meaning."""
        lines = super().left_aside(given)
        if given.get("partial_images") and not given.get("preview"):
            lines.append("partial_images was left aside: this model can show no previews")
        return lines


class EditsSchema(GenerationsSchema):
    """What `POST /v1/images/edits` takes, beside all fields of a native request."""

    aliases: ClassVar[Mapping[str, str]] = {**GenerationsSchema.aliases, "mask": "mask_image"}
    event_kind: ClassVar[str] = "image_edit"

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


def _wrong_stream(given: Mapping[str, Any]) -> list[FieldError]:
    details = []
    wanted, streams = given.get("partial_images", 0), given.get("stream", False)
    if not 0 <= wanted <= _MOST_PARTIAL_IMAGES:
        reason = f"{shown(wanted)} is not from 0 to {_MOST_PARTIAL_IMAGES}"
        details.append(FieldError("partial_images", reason))
    elif wanted and not streams:
        details.append(FieldError("partial_images", 'comes with "stream": true only'))
    if wanted and given.get("preview") is False:
        details.append(FieldError("preview", "is false, and partial_images asks for previews"))
    if streams and given.get("response_format") == URL:
        reason = f"is {URL}, and a stream brings the pictures themselves; leave it out"
        details.append(FieldError("response_format", reason))
    return details
