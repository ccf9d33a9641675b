"""The input images of one body: read, checked, and under the names they are to be stored by.

Does not know other fields, nor how a body was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from api.input_files import input_names
from api.input_images import InputImage, WrongPicture
from configs.errors import FieldError


@dataclass(frozen=True, slots=True)
class Inputs:
    """Input images that a body brought.

    Attributes:
        names: By parameter name: those of `image` as a tuple, that of `mask_image`.
        files: Bytes by name.
        digests: By parameter name, what tells the same images from others.
    """

    names: Mapping[str, Any]
    files: Mapping[str, bytes]
    digests: Mapping[str, Any]

    @classmethod
    def read(
        cls, given: Mapping[str, Any], request_id: str, max_pixels: int
    ) -> tuple[Self, list[FieldError]]:
        """Decode the images among the fields; return them, and what is wrong with each."""
        details: list[FieldError] = []
        images = _decoded("image", given.get("image", ()), max_pixels, details)
        sent_mask = given.get("mask_image")
        mask = _decoded(
            "mask_image", () if sent_mask is None else (sent_mask,), max_pixels, details
        )
        image_names = input_names(request_id, "input", images)
        mask_names = input_names(request_id, "mask", mask)
        files = dict(zip(image_names, (image.data for image in images), strict=True))
        files |= dict(zip(mask_names, (image.data for image in mask), strict=True))
        names: dict[str, Any] = {}
        digests: dict[str, Any] = {}
        if images:
            names["image"] = image_names
            digests["image"] = [image.sha256 for image in images]
        if mask:
            names["mask_image"] = mask_names[0]
            digests["mask_image"] = mask[0].sha256
        return cls(names, files, digests), details


def _decoded(
    name: str, sent: tuple[bytes, ...], max_pixels: int, details: list[FieldError]
) -> tuple[InputImage, ...]:
    images = []
    for index, data in enumerate(sent):
        try:
            images.append(InputImage.read(data, max_pixels))
        except WrongPicture as wrong:
            at = f"{name}[{index}]" if len(sent) > 1 else name
            details.append(FieldError(at, str(wrong)))
    return tuple(images)
