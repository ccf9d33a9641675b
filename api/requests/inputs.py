"""The input images of a body: decoded and checked before anything is queued, then stored."""

from __future__ import annotations

import hashlib
import io
import re
import secrets
import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Self

from PIL import ExifTags, Image, UnidentifiedImageError

from api.http.fields import WrongPicture
from configs.errors import FieldError
from configs.parameters import Parameters

_READ: Final = ("PNG", "JPEG", "WEBP")
# A JPEG of several pictures (phones, some cameras) counts as its first one.
_SEVERAL: Final = "MPO"
_FORMATS: Final = {"PNG": "png", "JPEG": "jpeg", _SEVERAL: "jpeg", "WEBP": "webp"}
# All pictures of a call may have so many times the pixels that one may have.
_MOST_TOGETHER: Final = 4
# Larger ones are decoded one after the other, and in one thread: the allocator keeps a share of
# what a thread had, 128 MB of a picture of 32 megapixels.
_SMALL: Final = 2**20
_DECODER: Final = ThreadPoolExecutor(1, "picture-decoder")
# What EXIF calls turned by a quarter, to either side, mirrored or not.
_SIDEWAYS: Final = frozenset({5, 6, 7, 8})
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

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.width * self.height

    @classmethod
    def read(cls, data: bytes, max_pixels: int, left: int | None = None) -> Self:
        """Decode a picture once, all of it, so that a broken one is refused here.

        Its header says how large it is: nothing is unpacked before that is compared with
        `max_pixels` and with the pixels that are `left` to the call.

        Raises:
            WrongPicture: It is none, is broken, moves, or has too many pixels.
        """
        if not data:
            raise WrongPicture(f"is empty; {_FIX}")
        try:
            canvas = _webp_canvas(data) or _canvas(data)
            _refuse_large(*canvas, max_pixels, left)
            if canvas[0] * canvas[1] <= _SMALL:
                return cls(data, *_decode(data))
            return cls(data, *_DECODER.submit(_decode, data).result())
        except WrongPicture:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise WrongPicture(f"has too many pixels; use {max_pixels} at most") from None
        except UnidentifiedImageError:
            raise WrongPicture(f"is not a picture of a known format; {_FIX}") from None
        except _UNREADABLE as error:
            reason = f"{type(error).__name__}: {error}"[:120]
            raise WrongPicture(f"cannot be decoded ({reason}); {_FIX}") from None


def _refuse_large(width: int, height: int, most: int, left: int | None) -> None:
    pixels = width * height
    if pixels > most:
        raise WrongPicture(f"is {width} x {height}, {pixels} pixels; use {most} at most")
    if left is not None and pixels > left:
        raise WrongPicture(
            f"brings the pictures of the call above {most * _MOST_TOGETHER} pixels; use smaller "
            "or fewer ones"
        )


def _canvas(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data), formats=_READ) as picture:
        return picture.size


def _decode(data: bytes) -> tuple[str, int, int]:
    """Return format, width and height of a picture that can be decoded; none of it is kept."""
    with Image.open(io.BytesIO(data), formats=_READ) as picture:
        if picture.format != _SEVERAL and getattr(picture, "is_animated", False):
            raise WrongPicture("is animated; send a still image")
        picture.load()
        size = picture.size
        if picture.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS:
            size = size[::-1]
        return _FORMATS[str(picture.format)], *size


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """Return width and height that the header of a WebP declares; None for any other file.

    Its reader makes room for all of it when it opens it.

    https://developers.google.com/speed/webp/docs/riff_container
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < _WEBP_HEAD:
        return None
    kind, body = data[12:16], data[20:_WEBP_HEAD]
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        sides = int.from_bytes(body[1:5], "little")
        return 1 + (sides & _SIDE), 1 + (sides >> 14 & _SIDE)
    width, height = (int.from_bytes(body[at : at + 2], "little") & _SIDE for at in (6, 8))
    return width, height


_WEBP_HEAD: Final = 30  # bytes
_SIDE: Final = 2**14 - 1


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
        sent = () if given.get("mask_image") is None else (given["mask_image"],)
        mask = _decoded("mask_image", sent, max_pixels, details, images)
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
    name: str,
    sent: tuple[bytes, ...],
    max_pixels: int,
    details: list[FieldError],
    before: Sequence[InputImage] = (),
) -> tuple[InputImage, ...]:
    images = list[InputImage]()
    for index, data in enumerate(sent):
        used = sum(image.pixels for image in (*before, *images))
        try:
            images.append(InputImage.read(data, max_pixels, max_pixels * _MOST_TOGETHER - used))
        except WrongPicture as wrong:
            at = f"{name}[{index}]" if len(sent) > 1 else name
            details.append(FieldError(at, str(wrong)))
    return tuple(images)
