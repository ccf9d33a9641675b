"""The tasks of pipelines, in the words of the field, and what each of them needs and makes.

Does not know which model can do which.
"""

from __future__ import annotations

from typing import Final

TEXT_TO_IMAGE: Final = "text-to-image"
IMAGE_TO_IMAGE: Final = "image-to-image"
INPAINT: Final = "inpaint"
TEXT_TO_VIDEO: Final = "text-to-video"
IMAGE_TO_VIDEO: Final = "image-to-video"

TASKS: Final = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT, TEXT_TO_VIDEO, IMAGE_TO_VIDEO)
IMAGE_TASKS: Final = frozenset({TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT})
VIDEO_TASKS: Final = frozenset({TEXT_TO_VIDEO, IMAGE_TO_VIDEO})
FROM_IMAGE_TASKS: Final = frozenset({IMAGE_TO_IMAGE, INPAINT, IMAGE_TO_VIDEO})
