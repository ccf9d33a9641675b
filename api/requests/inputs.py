"""The input images of a body: decoded and checked before anything is queued, then stored."""

from __future__ import annotations

import hashlib
import io
import re
import secrets
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from PIL import Image, ImageOps, UnidentifiedImageError

from api.http.fields import WrongPicture
from configs.errors import FieldError
from configs.parameters import Parameters

_FORMATS: Final = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp"}
_FIX: Final = "send a PNG, JPEG or WebP"
# Whatever a reader of picture files may raise about bytes that are none.
_UNREADABLE: Final = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class InputImage:
    """One picture as it was sent, and what was found in it.

    Attributes:
        data: The bytes of the file.
        format: `png`, `jpeg` or `webp`.
        width: Pixels, after the rotation that its EXIF asks for.
        height: Pixels, likewise.
    """

    data: bytes
    format: str
    width: int
    height: int

    @property
    def sha256(self) -> str:
        """Hash of the bytes, in hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()

    @classmethod
    def read(cls, data: bytes, max_pixels: int) -> Self:
        """Decode a picture once, all of it, so that a broken one is refused here.

        Raises:
            WrongPicture: It is none, is broken, moves, or has more than `max_pixels` pixels.
        """
        if not data:
            raise WrongPicture(f"is empty; {_FIX}")
        try:
            with Image.open(io.BytesIO(data), formats=tuple(_FORMATS)) as picture:
                # The header says how large it is: nothing is unpacked before that is known.
                pixels = picture.width * picture.height
                if pixels > max_pixels:
                    raise WrongPicture(_too_many(picture.width, picture.height, max_pixels))
                if getattr(picture, "is_animated", False):
                    raise WrongPicture("is animated; send a still image")
                picture.load()
                upright = ImageOps.exif_transpose(picture)
                return cls(data, _FORMATS[str(picture.format)], upright.width, upright.height)
        except WrongPicture:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise WrongPicture(f"has too many pixels; use {max_pixels} at most") from None
        except UnidentifiedImageError:
            raise WrongPicture(f"is not a picture of a known format; {_FIX}") from None
        except _UNREADABLE as error:
            reason = f"{type(error).__name__}: {error}"[:120]
            raise WrongPicture(f"cannot be decoded ({reason}); {_FIX}") from None


def _too_many(width: int, height: int, most: int) -> str:
    return f"is {width} x {height}, {width * height} pixels; use {most} at most"


_SIZE: Final = re.compile(r"-([0-9]+)x([0-9]+)-[0-9a-f]+\.[a-z]+\Z")


def input_names(request_id: str, kind: str, images: Sequence[InputImage]) -> tuple[str, ...]:
    """Return new names for the inputs of a request; `kind` is `input` or `mask`."""
    # A new token for each edit: the replica may be reading what was there before.
    token = secrets.token_hex(4)
    return tuple(
        f"{request_id}/{kind}-{index}-{image.width}x{image.height}-{token}.{image.format}"
        for index, image in enumerate(images)
    )


def input_size(name: str) -> tuple[int, int]:
    """Return width and height in pixels of the input of that name."""
    match = _SIZE.search(name)
    if match is None:
        raise ValueError(f"{name!r} is no name of an input")
    return int(match[1]), int(match[2])


def all_inputs(parameters: Parameters) -> tuple[str, ...]:
    """Return the names of all inputs of a request: its images, then its mask."""
    mask = parameters.mask_image
    return (*parameters.image, *((mask,) if mask else ()))


@dataclass(frozen=True, slots=True)
class InputFiles:
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


NO_INPUTS: Final = InputFiles({}, {}, {})


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
