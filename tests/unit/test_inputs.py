"""Input images as a pipeline gets them: upright, in one mode, cut to the size of the output."""

import io
from typing import Any

import pytest
from PIL import Image

from configs.errors import InputUnavailable
from configs.parameters import Parameters
from workers.engine.arguments import Inputs

ORIENTATION = 0x0112
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def file_of(image: Image.Image, form: str = "PNG", **options: object):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def read(files: dict[str, bytes], mask: str | None = None):
    names = tuple(name for name in files if name != mask)
    asked = Parameters("x", 1, 64, 64, 4, image=names, mask_image=mask)

    def stored(name: str):
        if name not in files:
            raise FileNotFoundError(name)
        return files[name]

    return Inputs.read(asked, stored)


def halves(mode: str = "RGB", left: Any = RED, right: Any = BLUE):
    image = Image.new(mode, (40, 20), left)
    image.paste(right, (20, 0, 40, 20))
    return image


def test_images_come_upright_and_in_order():
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # turn by a quarter to see it
    turned = file_of(halves(), "PNG", exif=exif)
    first, second = read({"a": turned, "b": file_of(halves())}).images
    assert (first.size, second.size) == ((20, 40), (40, 20))
    assert first.getpixel((5, 5)) == RED
    assert first.getpixel((5, 35)) == BLUE


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "I;16", "CMYK"])
def test_every_mode_becomes_rgb(mode: str):
    image = Image.new(mode, (8, 8), 0)
    form = "TIFF" if mode == "CMYK" else "PNG"
    assert read({"a": file_of(image, form)}).images[0].mode == "RGB"


def test_what_is_transparent_shows_white():
    image = halves("RGBA", (255, 0, 0, 255), (0, 0, 255, 0))
    shown = read({"a": file_of(image)}).images[0]
    assert (shown.getpixel((5, 5)), shown.getpixel((35, 5))) == (RED, WHITE)


def test_white_of_a_mask_is_painted_anew_and_transparent_parts_are_where_there_are_any():
    grey = read({"a": file_of(halves()), "m": file_of(halves("L", 0, 255))}, "m").mask
    hole = halves("RGBA", (255, 255, 255, 255), (9, 9, 9, 0))
    cut = read({"a": file_of(halves()), "m": file_of(hole)}, "m").mask
    for mask in (grey, cut):
        assert mask is not None
        assert mask.mode == "L"
        assert (mask.getpixel((5, 5)), mask.getpixel((35, 5))) == (0, 255)


def test_a_fitted_image_covers_the_size_and_keeps_its_proportions():
    mask = halves("L", 0, 255)
    inputs = Inputs((halves(),), mask).fitted(32, 32)
    image = inputs.images[0]
    assert inputs.mask is not None
    assert image.size == inputs.mask.size == (32, 32)
    for x, colour, level in ((2, RED, 0), (29, BLUE, 255)):
        assert image.getpixel((x, 16)) == colour
        assert inputs.mask.getpixel((x, 16)) == level


def test_small_images_are_enlarged_in_proportion_and_others_left_alone():
    small, large = Inputs((halves(), Image.new("RGB", (300, 200)))).at_least(128).images
    assert (small.size, large.size) == ((256, 128), (300, 200))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "the output store no longer has it"),
        ({"id/input-0.png": b"no picture"}, "cannot be read"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(files: dict[str, bytes], reason: str):
    asked = Parameters("x", 1, 64, 64, 4, image=("id/input-0.png",))

    def stored(name: str):
        if name not in files:
            raise FileNotFoundError(name)
        return files[name]

    with pytest.raises(InputUnavailable, match=reason) as refused:
        Inputs.read(asked, stored)
    assert "id/input-0.png" in str(refused.value)
