"""The little world of the tiny model: coloured shapes on coloured backgrounds, and their captions.

What can be drawn (shapes, colours, sizes, places), which combinations are held out of training,
how a picture is drawn, how it is put into words, and how a caption is read back.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.float32]


Rgb = tuple[float, float, float]


SIDE = 64  # pixels
SHAPES = ("circle", "square", "triangle", "star", "heart", "ring")


COLOURS: dict[str, Rgb] = {
    "red": (220, 38, 38),
    "orange": (245, 130, 20),
    "yellow": (250, 220, 40),
    "green": (34, 160, 70),
    "blue": (40, 80, 220),
    "purple": (130, 50, 180),
    "pink": (250, 150, 190),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
COLOUR_NAMES = tuple(COLOURS)


PLACES: dict[str, tuple[int, int]] = {
    "center": (0, 0),
    "left": (-1, 0),
    "right": (1, 0),
    "top": (0, -1),
    "bottom": (0, 1),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}


# Diameter as a share of the picture's side.
SIZES: dict[str, tuple[float, float]] = {
    "small": (0.38, 0.44),
    "medium": (0.49, 0.56),
    "large": (0.65, 0.72),
}


# A smaller star loses its notches on the 8x8 grid of the model's latents.
LEAST_RADIUS = {"star": 0.225}
MARGIN = 0.03  # free border around a shape pushed to an edge, as a share of the side


@dataclass(frozen=True)
class Spec:
    """What a caption says; size and place have the meaning of an unmentioned one by default."""

    shape: str
    colour: str
    background: str
    size: str = "medium"
    place: str = "center"


@dataclass(frozen=True)
class Drawing:
    """One shape with its exact numbers: centre and radius as shares of the side, colours 0-255."""

    shape: str
    cx: float
    cy: float
    radius: float
    colour: Rgb
    background: Rgb


def is_held_out(shape: str, colour: str, background: str) -> bool:
    """Whether this combination (about one in eight) is never shown in training.

    The rule is a lattice, so each pair (shape, colour), (shape, background) and
    (colour, background) is still seen with other partners.
    """
    s, c, b = SHAPES.index(shape), COLOUR_NAMES.index(colour), COLOUR_NAMES.index(background)
    return (c - s - b) % 8 == 3


def combinations(held_out: bool) -> Iterator[tuple[str, str, str]]:
    """All (shape, colour, background) with two different colours, held out or seen."""
    for shape in SHAPES:
        for colour in COLOUR_NAMES:
            for background in COLOUR_NAMES:
                if colour != background and is_held_out(shape, colour, background) == held_out:
                    yield shape, colour, background


def distance(shape: str, x: Array, y: Array) -> Array:
    """Signed distance to the shape's outline in units of its radius; below zero is inside."""
    ax, ay = np.abs(x), np.abs(y)
    radial = np.hypot(x, y)
    if shape == "circle":
        return np.asarray(radial - 0.95, np.float32)
    if shape == "square":
        return np.asarray(np.maximum(ax, ay) - 0.82, np.float32)
    if shape == "ring":
        return np.asarray(np.abs(radial - 0.74) - 0.22, np.float32)
    if shape == "triangle":
        return np.asarray(np.maximum(ax * 0.866 - (y + 1.0) * 0.45, y - 0.75), np.float32)
    if shape == "heart":
        u, v = ax * 1.06, 0.10 - y * 1.12
        lobe = v * 1.12 - 0.72 * np.sqrt(u)
        return np.asarray(np.hypot(u, lobe) - 0.98, np.float32)
    if shape == "star":
        return _star(radial, np.arctan2(x, -y))
    raise ValueError(f"unknown shape {shape!r}")


def _star(radial: Array, angle: Array) -> Array:
    """A five-pointed star: every point folded onto one half of one tip, then one straight edge."""
    fifth, inner = 2 * np.pi / 5, 0.42
    folded = np.abs(np.mod(angle + fifth / 2, fifth) - fifth / 2)
    px, py = radial * np.sin(folded), radial * np.cos(folded)
    notch_x, notch_y = inner * np.sin(fifth / 2), inner * np.cos(fifth / 2)
    nx, ny = 1.0 - notch_y, notch_x  # normal of the edge from the tip (0, 1) to the notch
    return np.asarray((px * nx + (py - 1.0) * ny) / np.hypot(nx, ny), np.float32)


def pixel_grid(side: int = SIDE) -> tuple[Array, Array]:
    """Pixel centres as shares of the side: (x, y), each of shape (side, side)."""
    line = (np.arange(side, dtype=np.float32) + 0.5) / side
    x, y = np.meshgrid(line, line, indexing="xy")
    return np.asarray(x, np.float32), np.asarray(y, np.float32)


def render(drawing: Drawing, side: int = SIDE) -> Array:
    """The drawing as (side, side, 3), values 0-255, edges smoothed over one pixel."""
    x, y = pixel_grid(side)
    radius = drawing.radius
    local = distance(drawing.shape, (x - drawing.cx) / radius, (y - drawing.cy) / radius)
    cover = np.clip(0.5 - local * radius * side, 0.0, 1.0)[..., None]
    colour = np.asarray(drawing.colour, np.float32)
    background = np.asarray(drawing.background, np.float32)
    return np.asarray(background * (1 - cover) + colour * cover, np.float32)


def realise(spec: Spec, rng: random.Random) -> Drawing:
    """Exact numbers for a spec, with a little play in size, place and both colours."""
    radius = max(rng.uniform(*SIZES[spec.size]) / 2, LEAST_RADIUS.get(spec.shape, 0.0))
    dx, dy = PLACES[spec.place]
    reach = 0.5 - radius - MARGIN

    def shade(name: str) -> Rgb:
        r, g, b = (min(255.0, max(0.0, v + rng.uniform(-5, 5))) for v in COLOURS[name])
        return r, g, b

    cx = 0.5 + dx * reach + rng.uniform(-0.02, 0.02)
    cy = 0.5 + dy * reach + rng.uniform(-0.02, 0.02)
    return Drawing(spec.shape, cx, cy, radius, shade(spec.colour), shade(spec.background))


def draw(spec: Spec, seed: int = 0) -> Image.Image:
    """A picture of the spec."""
    pixels = render(realise(spec, random.Random(seed)))
    return Image.fromarray(np.rint(pixels).astype(np.uint8))


def caption(spec: Spec) -> str:
    """The canonical caption, e.g. ``a small red star at the top left on a blue background``."""
    size = "" if spec.size == "medium" else f"{spec.size} "
    place = "" if spec.place == "center" else f" at the {spec.place}"
    thing = f"{size}{spec.colour} {spec.shape}"
    return f"{_a(thing)}{place} on {_a(spec.background)} background"


def _a(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def parse_caption(text: str) -> Spec:
    """Reads a caption back; raises ValueError where shape, colour or background is missing."""
    lowered = text.lower()
    colour_word = "|".join(COLOUR_NAMES)
    thing = re.search(rf"\b({colour_word}) ({'|'.join(SHAPES)})\b", lowered)
    ground = re.search(rf"\b({colour_word}) background\b", lowered)
    ground = ground or re.search(
        rf"\bon (?:an? )?({colour_word})\b(?! (?:{'|'.join(SHAPES)}))", lowered
    )
    if thing is None or ground is None:
        raise ValueError(f"no shape with a colour and a background in {text!r}")
    words = set(re.findall(r"[a-z]+", lowered))
    sizes = {"small": {"small", "tiny", "little"}, "large": {"large", "big", "huge"}}
    size = next((name for name, known in sizes.items() if words & known), "medium")
    place = " ".join(w for w in ("top", "bottom", "left", "right") if w in words)
    if place not in PLACES:
        place = "center"
    return Spec(thing[2], thing[1], ground[1], size, place)


# Shapes with thin parts are harder to learn, so they are shown more often.
SHAPE_WEIGHTS = {
    "circle": 1.0,
    "square": 1.0,
    "triangle": 1.0,
    "star": 1.7,
    "heart": 1.3,
    "ring": 1.5,
}
SIZE_WORDS = {
    "small": ("small", "small", "small", "little", "tiny"),
    "large": ("large", "large", "big"),
}
GLUE_WORDS = ("a", "an", "the", "of", "on", "at", "in", "with", "and", "background")
LEADS = ("picture of", "image of", "drawing of")
WORDS = sorted(
    {*SHAPES, *COLOUR_NAMES, *GLUE_WORDS, "picture", "image", "drawing", "medium"}
    | {word for words in SIZE_WORDS.values() for word in words}
    | {word for place in PLACES for word in place.split()}
)


def sample_spec(rng: random.Random, *, with_held_out: bool = False) -> Spec:
    """One spec, half of them at the centre; held-out combinations only on request."""
    while True:
        shape = rng.choices(SHAPES, [SHAPE_WEIGHTS[s] for s in SHAPES])[0]
        colour, background = rng.sample(COLOUR_NAMES, 2)
        if with_held_out or not is_held_out(shape, colour, background):
            break
    size = rng.choice(("small", "medium", "medium", "large"))
    place = rng.choice(tuple(PLACES)) if rng.random() < 0.55 else "center"
    return Spec(shape, colour, background, size, place)


def varied_caption(spec: Spec, rng: random.Random) -> str:
    """The canonical caption half of the time, else one of many other wordings."""
    if rng.random() < 0.5:
        return caption(spec)
    size = f"{rng.choice(SIZE_WORDS[spec.size])} " if spec.size in SIZE_WORDS else ""
    thing = _article(f"{size}{spec.colour} {spec.shape}", rng)
    ground = f"{spec.background} background"
    place = ""
    if spec.place != "center" or rng.random() < 0.15:
        place = rng.choice((f"at the {spec.place}", f"in the {spec.place}", spec.place))
    style = rng.random()
    if style < 0.45:
        text = f"{thing} {place} on {_article(ground, rng)}"
    elif style < 0.65:
        text = f"{thing} on {_article(ground, rng)}, {place}"
    elif style < 0.80:
        text = f"{thing}, {ground}, {place}"
    elif style < 0.88:
        text = f"{thing} {place} on {spec.background}"
    elif style < 0.95:
        text = f"{_article(ground, rng)} with {thing} {place}"
    else:  # the background is left to the model
        text = f"{thing} {place}"
    if rng.random() < 0.12:
        text = _article(f"{rng.choice(LEADS)} {text}", rng)
    return " ".join(text.split()).replace(" ,", ",").strip(", ")


def _article(phrase: str, rng: random.Random) -> str:
    """Mostly 'a' or 'an', sometimes 'the' or none."""
    roll = rng.random()
    if roll < 0.2:
        return phrase
    if roll < 0.3:
        return f"the {phrase}"
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"
