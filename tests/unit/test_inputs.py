"""Input images as a pipeline gets them: upright, in one mode, cut to the size of the output."""

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
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


RAMP = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
# RGBa and La are in memory only.
MODES = [
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "F",
    "I;16",
    "I;16L",
    "I;16B",
    "I;16N",
]
FORMS = ("PNG", "JPEG", "WEBP", "TIFF", "JPEG2000", "PPM", "IM", "TGA", "BMP", "SGI", "PCX", "GIF")
EXACT = {"lossless": True, "quality": 100, "compression": "raw"}


def ramp_in(mode: str) -> Image.Image:
    """All greys from black to white in a mode; those of 16 bits have 257 levels for each of 8."""
    if mode.startswith("I;16"):
        order = ">u2" if mode == "I;16B" else "<u2"
        levels = np.asarray(RAMP).astype(order) * np.uint16(257)
        return Image.frombytes(mode, RAMP.size, levels.astype(order).tobytes())
    if mode == "P":
        return RAMP.convert("RGB").quantize(256)
    return (
        RAMP.convert("RGB").convert(mode) if mode in {"LAB", "HSV", "YCbCr"} else RAMP.convert(mode)
    )


def held() -> Iterator[Any]:
    """Each mode in each format that gives back, of it, what was written."""
    for mode in MODES:
        written = ramp_in(mode)
        for form in FORMS:
            file = io.BytesIO()
            try:
                written.save(file, form, **EXACT)
                opened = Image.open(file)
                found = np.asarray(opened)
            except (OSError, ValueError, KeyError):
                continue
            if (opened.mode == "P") != (mode == "P"):
                continue  # numbers of colours are no levels
            want = np.asarray(written)
            if found.shape == want.shape and np.abs(found.astype(int) - want.astype(int)).max() < 3:
                yield pytest.param(mode, file.getvalue(), id=f"{mode}-{form}")


HELD = list(held())


def test_the_modes_that_formats_hold_are_among_the_cases():
    names = {str(case.id) for case in HELD}
    for form, modes in {
        "PNG": "1 L LA P RGB RGBA I;16 I;16B",
        "TIFF": "1 L LA P RGB RGBA CMYK LAB I F I;16 I;16B",
        "JPEG": "L RGB CMYK",
        "WEBP": "RGB",
    }.items():
        assert {f"{mode}-{form}" for mode in modes.split()} <= names


@pytest.mark.parametrize(("mode", "data"), HELD)
def test_every_mode_gives_what_the_file_of_8_bits_gives_as_image_and_as_mask(
    mode: str, data: bytes
):
    inputs = read({"a": data, "m": data}, "m")
    image, mask = inputs.images[0], inputs.mask
    assert mask is not None
    assert (image.mode, mask.mode) == ("RGB", "L")
    wanted = np.asarray(RAMP.convert("1").convert("L") if mode == "1" else RAMP, np.int16)
    for found in (*image.split(), mask):
        assert np.abs(np.asarray(found, np.int16) - wanted).max() <= 3


def test_integers_and_floats_without_a_stated_white_are_scaled_by_the_least_that_holds_them():
    levels = np.asarray(RAMP)
    for scaled in (levels * np.int32(257), (levels / 255).astype(np.float32)):
        data = file_of(Image.fromarray(scaled), "TIFF")
        assert np.array_equal(np.asarray(read({"a": data}).images[0].getchannel("R")), levels)


def png(depth: int, colour: int, row: bytes, width: int, key: bytes) -> bytes:
    """A PNG of one row, with a transparent colour, of depths that Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"tRNS", key),
        (b"IDAT", zlib.compress(b"\0" + row)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize(
    "data",
    [
        png(1, 0, b"\x40", 2, b"\0\1"),
        png(2, 0, b"\x10", 2, b"\0\1"),
        png(4, 0, b"\x07", 2, b"\0\7"),
        png(8, 0, b"\0\x60", 2, b"\0\x60"),
        png(16, 0, b"\0\0\x60\1", 2, b"\x60\1"),
        png(8, 2, b"\0\0\0\x60\x61\x62", 2, b"\0\x60\0\x61\0\x62"),
        png(16, 2, b"\0" * 6 + b"\x60\1\x61\2\x62\3", 2, b"\x60\1\x61\2\x62\3"),
    ],
    ids=["1", "2", "4", "8", "16", "rgb", "rgb16"],
)
def test_the_transparent_colour_of_a_png_of_any_depth_is_a_hole(data: bytes):
    inputs = read({"a": data, "m": data}, "m")
    assert inputs.mask is not None
    assert [inputs.images[0].getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), WHITE]
    assert [inputs.mask.getpixel((x, 0)) for x in (0, 1)] == [0, 255]


def test_a_picture_of_16_bits_is_turned_upright():
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image = Image.fromarray(np.full((20, 40), 65_535, np.uint16))
    assert read({"a": file_of(image, "PNG", exif=exif)}).images[0].size == (20, 40)


def test_several_pictures_of_a_phone_count_as_their_first():
    file = io.BytesIO()
    Image.new("RGB", (8, 8), RED).save(
        file, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8), BLUE)]
    )
    red, _, blue = read({"a": file.getvalue()}).images[0].getpixel((4, 4))
    assert red > 200 > 50 > blue


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
