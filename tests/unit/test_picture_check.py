"""The reader of pictures: drawn ones are right for their own caption and for no other."""

import dataclasses
import random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from scripts.lab.tiny_model.picture_check import check_picture, read_picture
from scripts.lab.tiny_model.shapes import (
    COLOUR_NAMES,
    PLACES,
    SHAPES,
    SIDE,
    SIZES,
    Spec,
    caption,
    draw,
    sample_spec,
)


@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_pictures_are_read_right(shape: str):
    rng = random.Random(0)
    for seed in range(40):
        spec = dataclasses.replace(sample_spec(rng, with_held_out=True), shape=shape)
        verdict = check_picture(draw(spec, seed), caption(spec))
        assert verdict.ok, (spec, verdict)
        assert verdict.size, (spec, verdict)


def test_blurred_and_noisy_pictures_are_read_right():
    rng = random.Random(1)
    noise = np.random.default_rng(1)
    right = 0
    for seed in range(60):
        spec = sample_spec(rng, with_held_out=True)
        blurred = draw(spec, seed).filter(ImageFilter.GaussianBlur(0.8))
        pixels = np.asarray(blurred, np.float32) + noise.normal(0, 8, (SIDE, SIDE, 3))
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        right += check_picture(image, spec).ok
    assert right >= 58


def test_swapped_pictures_are_refused():
    rng = random.Random(2)
    specs = [sample_spec(rng) for _ in range(60)]
    images = [draw(spec, seed) for seed, spec in enumerate(specs)]
    others = [*specs[1:], specs[0]]
    passed = [check_picture(i, s).ok for i, s in zip(images, others, strict=True)]
    assert sum(passed) <= 1


BASE = Spec("heart", "green", "white", "medium", "left")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("shape", SHAPES),
        ("colour", COLOUR_NAMES),
        ("background", COLOUR_NAMES),
        ("place", PLACES),
        ("size", SIZES),
    ],
)
def test_a_single_difference_is_named_and_nothing_else(field: str, values: tuple[str, ...]):
    for value in values:
        other = dataclasses.replace(BASE, **{field: value})
        if other == BASE or other.colour == other.background:
            continue
        verdict = dataclasses.asdict(check_picture(draw(other), BASE))
        assert [name for name, held in verdict.items() if not held] == [field], other


def test_an_empty_picture_shows_only_its_background():
    reading = read_picture(Image.new("RGB", (SIDE, SIDE), (40, 80, 220)))
    assert reading.background == "blue"
    assert reading.shape is None
    assert not check_picture(Image.new("RGB", (SIDE, SIDE)), BASE).ok


def test_noise_is_no_shape():
    pixels = np.random.default_rng(3).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    assert read_picture(Image.fromarray(pixels)).shape is None


def test_a_colour_without_a_name_is_none():
    assert read_picture(Image.new("RGB", (SIDE, SIDE), (0, 255, 255))).background is None


def test_a_larger_picture_is_read_at_the_size_of_the_world():
    large = draw(BASE).resize((256, 256), Image.Resampling.BICUBIC)
    assert check_picture(large, BASE).ok
