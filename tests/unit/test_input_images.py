"""Pictures that clients send: what is taken, what is refused, and with which words."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import subprocess
import sys
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from api.http.fields import WrongPicture, decode_data_url
from api.requests.inputs import InputFiles, InputImage
from tests.pictures import data_url, picture

MOST = 100 * 100
PNG = picture(40, 30)


def refused(data: bytes) -> str:
    with pytest.raises(WrongPicture) as caught:
        InputImage.read(data, MOST)
    return str(caught.value)


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_a_picture_is_known_by_its_bytes(form: str) -> None:
    data = picture(40, 30, form)
    image = InputImage.read(data, MOST)
    assert (image.format, image.width, image.height) == (form, 40, 30)
    assert image.data == data


def test_a_rotated_photograph_has_the_size_it_is_seen_in() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = InputImage.read(picture(40, 30, "jpeg", exif=exif), MOST)
    assert (image.width, image.height) == (30, 40)


def test_what_is_no_picture_is_refused() -> None:
    assert "empty" in refused(b"")
    assert "not a picture" in refused(b"GIF89a and no more")
    gif = io.BytesIO()
    Image.new("RGB", (4, 4)).save(gif, "gif")
    assert "not a picture of a known format" in refused(gif.getvalue())
    assert "cannot be decoded" in refused(PNG[: len(PNG) // 2])


def test_a_moving_picture_is_refused() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "webp", save_all=True, append_images=frames[1:], lossless=True)
    assert "is animated" in refused(file.getvalue())


def test_several_pictures_in_one_jpeg_count_as_the_first() -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(
        file, "MPO", save_all=True, append_images=[Image.new("RGB", (20, 15))]
    )
    image = InputImage.read(file.getvalue(), MOST)
    assert (image.format, image.width, image.height) == ("jpeg", 40, 30)


@pytest.mark.parametrize("options", [{"quality": 80}, {"lossless": True}, {"exif": Image.Exif()}])
def test_a_webp_is_measured_before_its_reader_makes_room_for_it(options: dict[str, Any]) -> None:
    data = picture(40, 30, "webp", **options)
    assert InputImage.read(data, 1200).pixels == 1200
    # Cut after its header: whoever opens it finds no picture.
    with pytest.raises(WrongPicture, match="is 40 x 30, 1200 pixels; use 1199 at most"):
        InputImage.read(data[:30], 1199)
    with pytest.raises(WrongPicture):
        InputImage.read(data[:30], 1200)


def test_all_pictures_of_a_call_have_a_bound_of_their_own() -> None:
    body = {"image": (PNG,) * 4, "mask_image": PNG}
    inputs, details = InputFiles.read(body, "req", 1200)
    assert [(each.param, "above 4800 pixels" in each.message) for each in details] == [
        ("mask_image", True)
    ]
    assert len(inputs.files) == 4
    assert InputFiles.read(body, "req", 1500)[1] == []


def test_large_pictures_take_their_memory_one_after_the_other() -> None:
    sides = 2048
    data = picture(sides, sides, "webp", lossless=True)
    alone, together = (peak_of_decoding(data, threads) for threads in (1, 6))
    assert together - alone < sides * sides * 4  # bytes of one picture


def peak_of_decoding(data: bytes, threads: int) -> int:
    """The most memory, in bytes, of a process that decodes a picture in several threads at once."""
    code = (
        "import resource, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from api.requests.inputs import InputImage\n"
        "data, threads = sys.stdin.buffer.read(), int(sys.argv[1])\n"
        "with ThreadPoolExecutor(threads) as pool:\n"
        "    list(pool.map(lambda _: InputImage.read(data, 2**24), range(threads)))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    command = [sys.executable, "-c", code, str(threads)]
    return 1024 * int(subprocess.run(command, input=data, capture_output=True, check=True).stdout)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its few bytes do not hold."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 100))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(("width", "height"), [(101, 100), (60_000, 60_000), (10_000, 9_500)])
def test_too_many_pixels_are_refused_by_the_header_alone(width: int, height: int) -> None:
    assert str(MOST) in refused(bomb(width, height))


@given(st.integers(0, len(PNG) - 1), st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused_and_never_worse(place: int, value: int) -> None:
    broken = PNG[:place] + bytes([value]) + PNG[place + 1 :]
    with contextlib.suppress(WrongPicture):
        InputImage.read(broken, MOST)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(WrongPicture):
        InputImage.read(data, MOST)


def test_data_urls() -> None:
    assert decode_data_url(data_url(PNG)) == PNG
    assert decode_data_url(data_url(PNG, "image/PNG;name=a.png")) == PNG
    assert decode_data_url(data_url(PNG).replace("data", "\n DATA", 1)) == PNG


@given(st.binary(min_size=1, max_size=400))
def test_base64_of_any_writer_is_understood(data: bytes) -> None:
    usual = base64.b64encode(data)
    for written in (
        base64.encodebytes(data),
        usual.replace(b"A", b"\r\n A\t"),
        usual.rstrip(b"="),
        base64.urlsafe_b64encode(data),
        base64.urlsafe_b64encode(data).rstrip(b"="),
    ):
        assert decode_data_url("data:image/png;base64," + written.decode()) == data


@pytest.mark.parametrize("begin", ["data:image/png", "data:image/png;base64", "data:image/"])
@pytest.mark.parametrize("mark", [";", ",", ":", "a", "=", " "])
def test_a_long_text_that_is_no_picture_is_refused_at_once(begin: str, mark: str) -> None:
    """A megabyte: what tried all ways to take it apart would not end."""
    with pytest.raises(WrongPicture):
        decode_data_url(begin + mark * 2**20)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "https://example.org/cat.png",
        "/etc/passwd",
        "data:text/plain;base64,aGk=",
        "data:image/png,raw",
        "data:image/png;base64,a",
        "data:image/png;base64,ab-_ab+/",
        "data:image/png;base64,YWJj=YWJj",
        "data:image/png;base64",
        "data:image/pngbase64,AAAA",
        "data:image/png;base64,@@@@",
        "data:image/png;base64,äöü",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(WrongPicture):
        decode_data_url(text)
