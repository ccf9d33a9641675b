"""Small real pictures for the tests."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image


def picture(
    width: int = 64, height: int = 64, form: str = "png", color: str = "red", **options: Any
) -> bytes:
    """The bytes of a picture of one color."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """The picture as a data URL."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def size_of(path: Path) -> tuple[int, int]:
    """Return width and height of a picture file, in pixels."""
    with Image.open(path) as image:
        return image.size
