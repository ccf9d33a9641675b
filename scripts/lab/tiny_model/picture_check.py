"""Reads a picture of the little world back: background, colour, shape, place and size.

It fits ideal outlines and the palette to the pixels; nothing here is learned.
``check_picture(image, prompt)`` is all an end-to-end test needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from scripts.lab.tiny_model.shapes import (
    COLOURS,
    MARGIN,
    PLACES,
    SHAPES,
    SIDE,
    SIZES,
    Array,
    Spec,
    distance,
    parse_caption,
    pixel_grid,
)

Mask = NDArray[np.bool_]


MIN_PIXELS = 40  # the smallest true shape covers about 170; less than this is only a speck
MIN_FIT = 0.65  # overlap with the best ideal shape under which there is no shape at all
MAX_COLOUR_GAP = 75.0  # distance to the nearest palette colour beyond which it has no name
FIRST_CONTRAST = 50.0  # distance from the background from which a pixel may be foreground


@dataclass(frozen=True)
class Reading:
    """What a picture shows; None for what cannot be told."""

    background: str | None
    colour: str | None = None
    shape: str | None = None
    place: str | None = None
    size: str | None = None
    fit: float = 0.0


@dataclass(frozen=True)
class PictureVerdict:
    """Which of a caption's statements hold; ``ok`` leaves the size out, as most captions do."""

    background: bool
    colour: bool
    shape: bool
    place: bool
    size: bool

    @property
    def ok(self) -> bool:
        """Whether everything but the size is right."""
        return self.background and self.colour and self.shape and self.place


def check_picture(image: Image.Image, prompt_or_spec: str | Spec) -> PictureVerdict:
    """Whether the picture shows what the prompt says."""
    spec = parse_caption(prompt_or_spec) if isinstance(prompt_or_spec, str) else prompt_or_spec
    seen = read_picture(image)
    return PictureVerdict(
        background=seen.background == spec.background,
        colour=seen.colour == spec.colour,
        shape=seen.shape == spec.shape,
        place=seen.place == spec.place,
        size=seen.size == spec.size,
    )


def read_picture(image: Image.Image) -> Reading:
    """Reads a picture without knowing its caption."""
    rgb = image.convert("RGB")
    if rgb.size != (SIDE, SIDE):
        rgb = rgb.resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = np.asarray(rgb, np.float32)
    frame = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground = np.median(frame, axis=0).astype(np.float32)
    background = name_colour(ground)
    mask, tint = _foreground(pixels, ground)
    if tint is None:
        return Reading(background)
    shape, fit, cx, cy, radius = _fit_shape(mask)
    if fit < MIN_FIT:
        return Reading(background, name_colour(tint), fit=fit)
    middle = {name: sum(bounds) / 4 for name, bounds in SIZES.items()}  # mean radius of each size
    size = min(middle, key=lambda name: abs(middle[name] - radius))
    return Reading(background, name_colour(tint), shape, _place(cx, cy, radius), size, fit)


def name_colour(rgb: Array) -> str | None:
    """The nearest colour of the palette, None where even that one is far."""
    gaps = {
        name: float(np.linalg.norm(rgb - np.asarray(value, np.float32)))
        for name, value in COLOURS.items()
    }
    nearest = min(gaps, key=lambda name: gaps[name])
    return nearest if gaps[nearest] <= MAX_COLOUR_GAP else None


def _foreground(pixels: Array, ground: Array) -> tuple[Mask, Array | None]:
    """The shape's pixels and its colour; no colour where hardly anything stands out."""
    away = np.linalg.norm(pixels - ground, axis=-1)
    rough = away > FIRST_CONTRAST
    if rough.sum() < MIN_PIXELS:
        return rough, None
    # Edge pixels are mixtures; the colour is read where all four neighbours stand out too.
    inner = rough.copy()
    for axis in (0, 1):
        for shift in (-1, 1):
            inner &= np.roll(rough, shift, axis)
    core = inner if inner.sum() >= MIN_PIXELS // 4 else rough
    tint = np.median(pixels[core], axis=0).astype(np.float32)
    return np.linalg.norm(pixels - tint, axis=-1) < away, tint


@cache
def _unit_measures(shape: str) -> tuple[float, float, float]:
    """Area and centroid of the shape of radius 1 around the origin."""
    x, y = pixel_grid(256)
    inside = distance(shape, (x - 0.5) * 2.4, (y - 0.5) * 2.4) < 0
    area = float(inside.mean()) * 2.4**2
    return area, float(x[inside].mean() - 0.5) * 2.4, float(y[inside].mean() - 0.5) * 2.4


def _fit_shape(mask: Mask) -> tuple[str | None, float, float, float, float]:
    """The ideal shape of greatest overlap: (name, overlap, cx, cy, radius).

    Each shape is first laid on the mask by area and centroid, which a few stray pixels
    hardly move, then shifted and scaled a little.
    """
    best: tuple[str | None, float, float, float, float] = (None, 0.0, 0.5, 0.5, 0.0)
    covered = float(mask.sum())
    if covered < MIN_PIXELS:
        return best
    x, y = pixel_grid()
    centre_x, centre_y = float(x[mask].mean()), float(y[mask].mean())
    for shape in SHAPES:
        area, off_x, off_y = _unit_measures(shape)
        natural = float(np.sqrt(covered / SIDE**2 / area))
        for scale in (0.9, 1.0, 1.1):
            radius = natural * scale
            for dx, dy in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)):
                cx = centre_x - off_x * radius + dx / SIDE
                cy = centre_y - off_y * radius + dy / SIDE
                ideal = distance(shape, (x - cx) / radius, (y - cy) / radius) < 0
                overlap = float((ideal & mask).sum()) / float((ideal | mask).sum())
                if overlap > best[1]:
                    best = (shape, overlap, cx, cy, radius)
    return best


def _place(cx: float, cy: float, radius: float) -> str | None:
    """The place whose ideal centre is nearest, by thirds of the room this radius leaves."""
    reach = 0.5 - radius - MARGIN
    if reach <= 0.02:  # it fills the picture: no place can be told
        return None

    def third(centre: float) -> int:
        share = (centre - 0.5) / reach
        return 0 if abs(share) < 0.5 else (1 if share > 0 else -1)

    where = (third(cx), third(cy))
    return next(name for name, offset in PLACES.items() if offset == where)
