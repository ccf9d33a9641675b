"""The little world: what is drawn is what the caption says, and held-out stays held out."""

import random

import pytest

from scripts.lab.tiny_model.shapes import (
    COLOUR_NAMES,
    COLOURS,
    PLACES,
    SHAPES,
    SIDE,
    SIZES,
    WORDS,
    Spec,
    caption,
    combinations,
    draw,
    is_held_out,
    parse_caption,
    sample_spec,
    varied_caption,
)


def test_the_world_has_the_promised_shapes_and_colours():
    assert {"circle", "square", "triangle", "star", "heart", "ring"} <= set(SHAPES)
    assert len(COLOURS) == 9


def test_every_caption_reads_back_to_its_spec():
    for shape, colour, background in combinations(held_out=True):
        for size in SIZES:
            for place in PLACES:
                spec = Spec(shape, colour, background, size, place)
                assert parse_caption(caption(spec)) == spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a red circle on a blue background", Spec("circle", "red", "blue")),
        ("Red circle, blue background", Spec("circle", "red", "blue")),
        (
            "a small yellow star at the top left on a black background",
            Spec("star", "yellow", "black", "small", "top left"),
        ),
        ("an orange background with a big pink ring", Spec("ring", "pink", "orange", "large")),
        (
            "the white heart, green background, bottom",
            Spec("heart", "white", "green", place="bottom"),
        ),
        ("a blue square at the right on white", Spec("square", "blue", "white", place="right")),
    ],
)
def test_other_wordings_are_understood(text: str, spec: Spec):
    assert parse_caption(text) == spec


@pytest.mark.parametrize("text", ["", "a cat on a mat", "a red circle", "a blue background"])
def test_an_incomplete_caption_is_refused(text: str):
    with pytest.raises(ValueError, match="no shape with a colour and a background"):
        parse_caption(text)


def test_varied_captions_never_say_something_else():
    rng = random.Random(1)
    complete = 0
    for _ in range(1000):
        spec = sample_spec(rng)
        text = varied_caption(spec, rng)
        if "background" in text:
            assert parse_caption(text) == spec, text
            complete += 1
    assert complete > 900


def test_every_word_of_a_caption_is_in_the_vocabulary():
    rng = random.Random(2)
    words = {
        word
        for _ in range(1000)
        for word in varied_caption(sample_spec(rng), rng).replace(",", " ").split()
    }
    assert words <= set(WORDS)


def test_training_never_draws_a_held_out_combination():
    rng = random.Random(3)
    for _ in range(2000):
        spec = sample_spec(rng)
        assert not is_held_out(spec.shape, spec.colour, spec.background)


def test_held_out_combinations_leave_every_pair_seen():
    held_out, seen = list(combinations(held_out=True)), list(combinations(held_out=False))
    assert 40 <= len(held_out) <= 60
    assert not set(held_out) & set(seen)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        pairs = {(c[first], c[second]) for c in held_out}
        assert pairs <= {(c[first], c[second]) for c in seen}
    assert {c[0] for c in held_out} == set(SHAPES)
    assert {c[1] for c in held_out} == set(COLOUR_NAMES)


def test_a_picture_has_the_size_and_is_repeatable():
    spec = Spec("star", "red", "white")
    assert draw(spec, 4).size == (SIDE, SIDE)
    assert draw(spec, 4).tobytes() == draw(spec, 4).tobytes()
    assert draw(spec, 4).tobytes() != draw(spec, 5).tobytes()
