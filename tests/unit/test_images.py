"""Image files: formats, what is written into them, and equal bytes for equal images."""

import io
import json
from typing import Any

import pytest
from PIL import Image

from configs.parameters import IMAGE_FORMATS, Lora, Parameters
from workers.outputs import describe, encode

PARAMETERS = Parameters(
    prompt="ein roter Kreis auf blauem Grund, 赤い丸 🔴",
    negative_prompt="grün",
    seed=7,
    width=16,
    height=8,
    num_inference_steps=4,
    guidance_scale=3.5,
    lora=(Lora("ink"), Lora("pixel", 0.5)),
)
FIELDS = {
    "prompt": PARAMETERS.prompt,
    "negative_prompt": "grün",
    "seed": 8,
    "num_inference_steps": 4,
    "guidance_scale": 3.5,
    "scheduler": "DDIMScheduler",
    "lora": "ink 1, pixel 0.5",
    "width": 16,
    "height": 8,
    "model": "tiny",
}


def picture():
    return Image.linear_gradient("L").resize((16, 8)).convert("RGB")


def encoded(
    form: str = "png",
    prompt: str = PARAMETERS.prompt,
    level: int | None = None,
    *,
    metadata: bool = True,
) -> bytes:
    changes = {"output_format": form, "prompt": prompt, "output_compression": level}
    parameters = PARAMETERS.with_changes(changes)
    fields = describe(parameters, 8, "tiny", (16, 8), "DDIMScheduler") if metadata else {}
    return encode(picture(), parameters, fields)


def opened(data: bytes) -> Any:
    return Image.open(io.BytesIO(data))


def comment(data: bytes):
    raw = opened(data).getexif().get_ifd(0x8769)[0x9286]
    assert raw.startswith(b"ASCII\0\0\0")
    return json.loads(raw[8:])


@pytest.mark.parametrize("form", IMAGE_FORMATS)
def test_the_file_is_of_the_format_and_size(form: str):
    image = opened(encoded(form))
    assert (image.format, image.size) == (form.upper(), (16, 8))


def test_a_png_holds_the_pixels_and_the_fields_as_text():
    image = opened(encoded())
    assert image.tobytes() == picture().tobytes()
    assert image.text == {name: str(value) for name, value in FIELDS.items()}


@pytest.mark.parametrize("form", ["jpeg", "webp"])
def test_jpeg_and_webp_hold_the_fields_as_a_user_comment(form: str):
    assert comment(encoded(form)) == FIELDS


@pytest.mark.parametrize("form", IMAGE_FORMATS)
def test_equal_images_give_equal_bytes(form: str):
    assert encoded(form) == encoded(form)


@pytest.mark.parametrize("form", IMAGE_FORMATS)
def test_without_metadata_nothing_is_written(form: str):
    data = encoded(form, metadata=False)
    image = opened(data)
    assert not image.getexif()
    assert not getattr(image, "text", {})
    assert b"Kreis" not in data


@pytest.mark.parametrize("form", ["jpeg", "webp"])
def test_compression_is_the_quality(form: str):
    sizes = [len(encoded(form, level=level, metadata=False)) for level in (5, 100)]
    assert sizes[0] < sizes[1]


def test_prompts_too_long_for_a_jpeg_are_cut_there():
    fields = comment(encoded("jpeg", prompt="🔴" * 8192))
    assert fields["prompt"] == "🔴" * 2000
    assert fields["seed"] == 8


def test_a_png_holds_a_long_prompt_whole():
    image = opened(encoded(prompt="🔴" * 8192))
    assert image.text["prompt"] == "🔴" * 8192


def test_half_a_surrogate_pair_does_not_break_the_file():
    assert opened(encoded(prompt="a\ud800b")).text["prompt"] == "a?b"


def test_a_jpeg_of_an_image_with_alpha_is_opaque():
    parameters = PARAMETERS.with_changes({"output_format": "jpeg"})
    data = encode(picture().convert("RGBA"), parameters, {})
    assert opened(data).mode == "RGB"
