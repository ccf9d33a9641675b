"""Pictures that clients send: decoded and checked before anything is queued.

A picture comes as the bytes of a file or as a data URL. What it is, its bytes say and not the name
that the client gave it. Does not know the fields they came in, nor where they are stored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import struct
import zlib
from dataclasses import dataclass
from typing import Final, Self

from PIL import Image, ImageOps, UnidentifiedImageError

_FORMATS: Final = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp"}
_DATA_URL: Final = re.compile(r"data:(?P<type>[^,;]*)(?:;[^,;]*)*;base64,", re.IGNORECASE)
_MEND: Final = "send a PNG, JPEG or WebP"
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


class WrongPicture(ValueError):
    """Raised when bytes or a text are no picture that is taken; its text begins with a verb."""


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
            raise WrongPicture(f"is empty; {_MEND}")
        try:
            with Image.open(io.BytesIO(data), formats=tuple(_FORMATS)) as picture:
                # The header says how large it is: nothing is unpacked before that is known.
                pixels = picture.width * picture.height
                if pixels > max_pixels:
                    raise WrongPicture(_too_many(picture.width, picture.height, max_pixels))
                if getattr(picture, "is_animated", False):
                    raise WrongPicture("moves; send one picture that stands still")
                picture.load()
                upright = ImageOps.exif_transpose(picture)
                return cls(data, _FORMATS[str(picture.format)], upright.width, upright.height)
        except WrongPicture:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise WrongPicture(f"has more than the {max_pixels} pixels it may have") from None
        except UnidentifiedImageError:
            raise WrongPicture(f"is no picture that is known here; {_MEND}") from None
        except _UNREADABLE as error:
            reason = f"{type(error).__name__}: {error}"[:120]
            raise WrongPicture(f"can not be decoded ({reason}); {_MEND}") from None


def decode_data_url(text: str) -> bytes:
    """Return the bytes that a data URL of a picture holds.

    Raises:
        WrongPicture: It is no data URL, not of a picture, or not in base64.
    """
    match = _DATA_URL.match(text)
    if match is None or not match["type"].lower().startswith("image/"):
        raise WrongPicture(
            "is no data URL of a picture; write data:image/png;base64, and the file in base64. "
            "Nothing is fetched from other addresses"
        )
    try:
        return base64.b64decode(text[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise WrongPicture("is a data URL whose base64 can not be decoded") from None


def _too_many(width: int, height: int, most: int) -> str:
    return f"is {width} x {height}, {width * height} pixels; {most} is the most"
