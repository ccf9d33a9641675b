"""Makes image files: PNG, JPEG or WebP bytes that carry how they were made.

The same image and parameters give the same bytes: no time, host, request or replica is written.
Knows nothing of pipelines and of where the files go.
"""

import io
import json
from typing import Any

from PIL import Image, PngImagePlugin

from routing.parameters import Parameters
from workers.description import Fields, describe

_QUALITY = {"jpeg": 95, "webp": 90}
_PREVIEW_QUALITY = 75
_USER_COMMENT, _EXIF_IFD = 0x9286, 0x8769
# A JPEG holds its EXIF in one segment of 64 KiB.
_COMMENT_BYTES = 60_000
_SHORT_PROMPT = 2_000


def encode(
    image: Image.Image,
    parameters: Parameters,
    seed: int,
    model: str,
    *,
    scheduler: str | None = None,
    metadata: bool = True,
) -> bytes:
    """Return `image` as a file of `parameters.output_format`.

    With `metadata` the file says what makes the image again: as text chunks of a PNG, one for each
    field, and as JSON in the EXIF user comment of a JPEG or WebP.

    Args:
        image: What was made.
        parameters: How.
        seed: Seed that makes this image alone.
        model: Name by which clients ask for the model.
        scheduler: The noise scheduler that ran; None for the one that was asked for.
        metadata: Whether to write the fields.
    """
    form = parameters.output_format
    fields = describe(parameters, seed, model, image.size, scheduler) if metadata else {}
    options: dict[str, Any] = {}
    if form == "png":
        options["pnginfo"] = _png_text(fields)
    else:
        quality = parameters.output_compression
        options["quality"] = _QUALITY[form] if quality is None else quality
        if fields:
            options["exif"] = _user_comment(fields)
    if form == "jpeg" and image.mode != "RGB":
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, format=form, **options)
    return file.getvalue()


def encode_preview(picture: Image.Image) -> bytes:
    """Return a small picture as a JPEG of a few kilobytes."""
    file = io.BytesIO()
    picture.save(file, format="jpeg", quality=_PREVIEW_QUALITY)
    return file.getvalue()


def _png_text(fields: Fields) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    for name, value in fields.items():
        # A lone surrogate can stand in JSON and not in UTF-8.
        info.add_itxt(name, str(value).encode("utf-8", "replace").decode())
    return info


def _user_comment(fields: Fields) -> bytes:
    text = json.dumps(fields)
    if len(text) > _COMMENT_BYTES:
        shortened = {
            name: value[:_SHORT_PROMPT] if isinstance(value, str) else value
            for name, value in fields.items()
        }
        text = json.dumps(shortened)
    exif = Image.Exif()
    exif.get_ifd(_EXIF_IFD)[_USER_COMMENT] = b"ASCII\0\0\0" + text.encode("ascii")
    return exif.tobytes()
