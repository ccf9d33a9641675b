"""The formats of output files, by the names that requests use, and their media types.

Does not know how a file is made.
"""

from __future__ import annotations

from typing import Final

IMAGE_FORMATS: Final = ("png", "jpeg", "webp")
VIDEO_FORMATS: Final = ("mp4",)
OUTPUT_FORMATS: Final = (*IMAGE_FORMATS, *VIDEO_FORMATS)
MEDIA_TYPES: Final = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "mp4": "video/mp4",
}
