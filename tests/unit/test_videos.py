"""Video files: played back they show the frames, and they say how they were made."""

import io
import json
from fractions import Fraction

import av
import numpy as np
import pytest

from configs.parameters import TEXT_TO_VIDEO, Parameters
from workers.engine.generation import Video
from workers.outputs import describe, encode_video

ASKED = Parameters(
    'a "red" flag, é', 7, 64, 48, 4, task=TEXT_TO_VIDEO, num_frames=9, fps=16.0, output_format="mp4"
)
FIELDS = describe(ASKED, 7, "tiny", (64, 48), "S")


def moving(frames: int = 9, height: int = 48, width: int = 64):
    """A white bar that goes from left to right over red and blue halves."""
    pixels = np.zeros((frames, height, width, 3), np.uint8)
    pixels[:, : height // 2], pixels[:, height // 2 :] = (220, 30, 40), (20, 60, 200)
    for index in range(frames):
        pixels[index, :, 6 * index : 6 * index + 6] = 255
    return pixels


def played(data: bytes):
    with av.open(io.BytesIO(data), "r") as file:
        stream = file.streams.video[0]
        about = (
            stream.codec_context.name,
            stream.codec_context.pix_fmt,
            stream.average_rate,
            stream.codec_context.colorspace,
        )
        return dict(file.metadata), about, np.stack(
            [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        )  # fmt: skip


def test_played_back_it_shows_the_frames_in_their_colours():
    frames = moving()
    _, about, shown = played(encode_video(Video(frames, 16.0), FIELDS))
    assert about == ("h264", "yuv420p", 16, 1)  # 1 is BT.709
    assert shown.shape == frames.shape
    difference = np.abs(shown.astype(int) - frames)
    assert difference.mean() < 4
    for index in (0, 8):
        assert np.abs(shown[index, 4, 60].astype(int) - (220, 30, 40)).max() < 8
    assert shown[3, 24, 21].min() > 230


@pytest.mark.parametrize(
    ("fps", "rate"), [(8.0, Fraction(8)), (29.97, Fraction(2997, 100)), (0.5, Fraction(1, 2))]
)
def test_frames_in_a_second_are_as_asked(fps: float, rate: Fraction):
    _, about, _ = played(encode_video(Video(moving(), fps), FIELDS))
    assert about[2] == rate


def test_the_comment_makes_the_video_again():
    metadata, _, _ = played(encode_video(Video(moving(), 16.0), FIELDS))
    assert json.loads(metadata["comment"]) == {
        "task": "text-to-video",
        "prompt": 'a "red" flag, é',
        "seed": 7,
        "num_inference_steps": 4,
        "scheduler": "S",
        "width": 64,
        "height": 48,
        "num_frames": 9,
        "fps": 16.0,
        "model": "tiny",
    }
    bare, _, _ = played(encode_video(Video(moving(), 16.0), {}))
    assert "comment" not in bare


def test_the_same_frames_give_the_same_bytes_and_the_index_stands_first():
    first = encode_video(Video(moving(), 16.0), FIELDS)
    for _ in range(30):
        # What lies in memory before must not count.
        np.random.default_rng().integers(0, 255, 100_000, dtype=np.uint8)
        assert encode_video(Video(moving(), 16.0), FIELDS) == first
    assert 0 < first.find(b"moov") < first.find(b"mdat")


@pytest.mark.parametrize(("height", "width"), [(33, 64), (32, 65), (33, 65)])
def test_an_odd_size_is_made_even(height: int, width: int):
    shown = played(encode_video(Video(moving(5, height, width), 8.0), FIELDS))[2]
    assert shown.shape == (5, height + height % 2, width + width % 2, 3)


def test_a_single_frame_is_a_video_too():
    assert played(encode_video(Video(moving(1), 8.0), FIELDS))[2].shape[0] == 1
