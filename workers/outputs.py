"""The outputs of a run: encoded as files that say how they were made, and stored."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image, PngImagePlugin

from configs.errors import OutputWriteFailed
from configs.parameters import ARGUMENTS, MEDIA_TYPES, TEXT_TO_IMAGE, Parameters
from routing.outputs import OutputStore
from routing.request import Output, Request
from workers.engine.generation import Generation, Video

_logger = logging.getLogger(__name__)


Fields = dict[str, str | int | float]


def describe(
    parameters: Parameters, seed: int, model: str, size: tuple[int, int], scheduler: str
) -> Fields:
    """Return the fields to write into a file; what was not asked for is left out.

    Args:
        parameters: How it was made.
        seed: Seed that makes this output alone.
        model: Name by which clients ask for the model.
        size: Width and height of what was made, pixels.
        scheduler: The noise scheduler that ran.
    """
    adapters = parameters.lora
    fields: dict[str, str | int | float | None] = {
        "task": None if parameters.task == TEXT_TO_IMAGE else parameters.task,
        "prompt": parameters.prompt,
        "negative_prompt": parameters.negative_prompt,
        "seed": seed,
        "num_inference_steps": parameters.num_inference_steps,
        **{name: getattr(parameters, name) for name in ARGUMENTS},
        "scheduler": scheduler,
        "lora": ", ".join(f"{each.name} {each.scale:g}" for each in adapters) if adapters else None,
        "width": size[0],
        "height": size[1],
        "num_frames": parameters.num_frames,
        "fps": parameters.fps,
        "model": model,
    }
    return {name: value for name, value in fields.items() if value is not None}


_QUALITY = {"jpeg": 95, "webp": 90}


_USER_COMMENT, _EXIF_IFD = 0x9286, 0x8769


# A JPEG holds its EXIF in one segment of 64 KiB.
_COMMENT_BYTES = 60_000


_SHORT_PROMPT = 2_000


def encode(image: Image.Image, parameters: Parameters, fields: Fields) -> bytes:
    """Return `image` as a file of `parameters.output_format` that says what makes it again.

    `fields` become text chunks of a PNG, one for each, and JSON in the EXIF user comment of a JPEG
    or WebP.
    """
    form = parameters.output_format
    options: dict[str, Any] = {}
    if form == "png":
        options["pnginfo"] = _png_text(fields)
    else:
        quality = parameters.output_compression
        options["quality"] = _QUALITY[form] if quality is None else quality
        if fields:
            options["exif"] = _user_comment(fields)
    if form == "jpeg" and image.mode != "RGB":
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, format=form, **options)
    return file.getvalue()


def _png_text(fields: Fields) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    for name, value in fields.items():
        # A lone surrogate can stand in JSON and not in UTF-8.
        info.add_itxt(name, str(value).encode("utf-8", "replace").decode())
    return info


def _user_comment(fields: Fields) -> bytes:
    text = json.dumps(fields)
    if len(text) > _COMMENT_BYTES:
        shortened = {
            name: value[:_SHORT_PROMPT] if isinstance(value, str) else value
            for name, value in fields.items()
        }
        text = json.dumps(shortened)
    exif = Image.Exif()
    exif.get_ifd(_EXIF_IFD)[_USER_COMMENT] = b"ASCII\0\0\0" + text.encode("ascii")
    return exif.tobytes()


_THREADS = 4


# Constant rate factor of x264: 0 is without loss, 23 its default, 17 looks like the frames.
_RATE_FACTOR = "17"


# Without macroblock-tree rate control, under which the same frames gave other bytes in a few of a
# hundred runs (x264 core 165, with one thread as well); without it in none of four thousand.
_OPTIONS = {"crf": _RATE_FACTOR, "mbtree": "0"}


# Fractions such as 30000/1001 are exact, and no time base grows beyond what players take.
_FINEST = 1001


def encode_video(video: Video, fields: Fields) -> bytes:
    """Return `video` as an MP4 file that browsers play while they load it.

    The pixels are yuv420p in the colours of BT.709, the index stands at the front. An odd width or
    height, which yuv420p cannot have, gets its last column or row twice. `fields` are the comment
    of the file, as JSON.

    Raises:
        OutputWriteFailed: The encoder failed.
    """
    try:
        # A file and no buffer: moving the index to the front reads what was written.
        with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
            _write_video(file.name, video, json.dumps(fields) if fields else None)
            return file.read()
    except (OSError, av.FFmpegError) as error:
        raise OutputWriteFailed(
            f"the video could not be encoded: {type(error).__name__}: {error}"
        ) from error


def _write_video(path: str, video: Video, comment: str | None) -> None:
    frames = _even(video.frames)
    options = {"movflags": "+faststart", "fflags": "+bitexact"}
    with av.open(path, "w", format="mp4", options=options) as file:
        if comment is not None:
            file.metadata["comment"] = comment
        rate = Fraction(video.fps).limit_denominator(_FINEST)
        stream: Any = file.add_stream("libx264", rate=rate, options=_OPTIONS)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = _THREADS
        stream.codec_context.colorspace = Colorspace.ITU709
        stream.codec_context.color_range = ColorRange.MPEG
        stream.codec_context.color_primaries = ColorPrimaries.BT709
        stream.codec_context.color_trc = ColorTrc.BT709
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
                format="yuv420p",
                # What the library would take of itself is BT.601, whatever the file says.
                dst_colorspace=Colorspace.ITU709,
                dst_color_range=ColorRange.MPEG,
            )
            file.mux(stream.encode(frame))
        file.mux(stream.encode())


def _even(frames: Any) -> Any:
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(frames)


@dataclass(frozen=True, slots=True)
class OutputWriter:
    """Writes outputs to a store, with how they were made in them where ``metadata`` says so."""

    store: OutputStore
    metadata: bool

    def write(self, request: Request, made: Generation) -> tuple[Output, ...]:
        """Store all outputs of an attempt and return what the record is to say of them.

        Raises:
            OutputWriteFailed: One could not be stored; none is left there.
        """
        parameters, form = request.parameters, request.parameters.output_format
        written: list[Output] = []
        try:
            outputs: tuple[Image.Image | Video, ...] = made.videos or made.images
            for index, (each, seed) in enumerate(zip(outputs, made.seeds, strict=True)):
                fields: Fields = {}
                if self.metadata:
                    fields = describe(parameters, seed, request.model, each.size, made.scheduler)
                video = each if isinstance(each, Video) else None
                if isinstance(each, Video):
                    data = encode_video(each, fields)
                else:
                    data = encode(each, parameters, fields)
                name = f"{request.id}/{request.attempt}-{index}.{form}"
                self.store.write(name, data)
                output = Output(
                    name=name,
                    media_type=MEDIA_TYPES[form],
                    width=each.size[0],
                    height=each.size[1],
                    seed=seed,
                    bytes=len(data),
                    sha256=hashlib.sha256(data).hexdigest(),
                    num_frames=video.num_frames if video else None,
                    fps=video.fps if video else None,
                )
                written.append(output)
        except BaseException:
            self.remove(written)
            raise
        return tuple(written)

    def remove(self, outputs: Iterable[Output]) -> None:
        """Remove files that count for nothing; what the store does not remove goes with the rest.

        All files of a request go with its record.
        """
        for output in outputs:
            try:
                self.store.remove_file(output.name)
            except Exception as error:  # noqa: BLE001 - any file system may fail in its own way
                _logger.warning("%s could not be removed: %s", output.name, error)

    def remove_earlier(self, request: Request) -> None:
        """Remove what earlier attempts of a request stored, as :meth:`remove` does."""
        try:
            self.store.remove_attempts_before(request.id, request.attempt)
        except Exception as error:  # noqa: BLE001 - any file system may fail in its own way
            _logger.warning("files of %s could not be removed: %s", request.id, error)
