"""Makes video files: MP4 (H.264) bytes that carry how they were made.

The same frames and parameters give the same bytes on any machine of the same architecture and
version of the encoder: no time is written, and the number of the encoder's threads, on which its
output depends, is fixed. Knows nothing of pipelines and of where the files go.
"""

import json
import tempfile
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

from configs.errors import OutputWriteFailed
from routing.parameters import Parameters
from workers.description import describe
from workers.engine.generation import Video

_THREADS = 4
# Constant rate factor of x264: 0 is without loss, 23 its default, 17 looks like the frames.
_RATE_FACTOR = "17"
# Without macroblock-tree rate control, under which the same frames gave other bytes in a few of a
# hundred runs (x264 core 165, with one thread as well); without it in none of four thousand.
_OPTIONS = {"crf": _RATE_FACTOR, "mbtree": "0"}
# Fractions such as 30000/1001 are exact, and no time base grows beyond what players take.
_FINEST = 1001


def encode_video(
    video: Video,
    parameters: Parameters,
    seed: int,
    model: str,
    *,
    scheduler: str | None = None,
    metadata: bool = True,
) -> bytes:
    """Return `video` as an MP4 file that browsers play while they load it.

    The pixels are yuv420p in the colours of BT.709, the index stands at the front. An odd width or
    height, which yuv420p cannot have, gets its last column or row twice. With `metadata` the
    comment of the file says, as JSON, what makes the video again.

    Raises:
        OutputWriteFailed: The encoder failed.
    """
    comment = None
    if metadata:
        comment = json.dumps(describe(parameters, seed, model, video.size, scheduler))
    try:
        # A file and no buffer: moving the index to the front reads what was written.
        with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
            _write(file.name, video, comment)
            return file.read()
    except (OSError, av.FFmpegError) as error:
        raise OutputWriteFailed(
            f"the video could not be encoded: {type(error).__name__}: {error}"
        ) from error


def _write(path: str, video: Video, comment: str | None) -> None:
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
