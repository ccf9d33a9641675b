"""Limits that the model and the settings set together.

Does not know single requests.
"""

from __future__ import annotations

from api.catalog import ServedModel
from configs.settings import Settings


def max_pixels(model: ServedModel, settings: Settings) -> int:
    """Return the largest width x height that an output of the model may have."""
    return min(model.abilities.max_pixels, settings.max_pixels)


def max_frames(model: ServedModel, settings: Settings) -> int:
    """Return the most frames that a video of the model may have."""
    return min(model.abilities.max_frames or settings.max_frames, settings.max_frames)
