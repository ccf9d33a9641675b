"""Random specs and their captions in varied words: what the tiny model is trained on.

Knows how often each shape, size and place is drawn and the ways a spec may be put into
words. Knows nothing of pixels or models.
"""

from __future__ import annotations

import random

from scripts.tiny_model.shapes import COLOUR_NAMES, PLACES, SHAPES, Spec, caption, is_held_out

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
