"""What a run made: pictures, videos and the figures that go with them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.video_processor import VideoProcessor
from numpy.typing import NDArray
from PIL import Image

from configs.errors import NonFiniteOutput
from configs.parameters import Parameters
from workers.families import IMAGE_FIELDS, SINGLE_VIDEO_FIELD, VIDEO_FIELDS
from workers.patches import put


def refuse_non_finite(finite: torch.Tensor, maker: str) -> None:
    """Raise NonFiniteOutput unless what `maker` gave is all numbers; waits for the device.

    `finite` holds truth values, for the whole or for its parts.
    """
    if not bool(finite.all()):
        raise non_finite(maker)


def non_finite(maker: str) -> NonFiniteOutput:
    """Return the error for what `maker` gave."""
    return NonFiniteOutput(
        f"{maker} gave NaN or infinity;"
        " another dtype (bfloat16 or float32), size or guidance may help"
    )


def watch_decoder(vae: Any, tell: Callable[[torch.Tensor], None]) -> bool:
    """Have `tell` called with whether what an autoencoder's decoder made is finite, each time.

    That is a truth value on its device, for which nobody has waited. Its numbers may be too large
    for its type; the pixels do not show it: on their way infinity is clamped to white or black.
    False where there is no decoder to watch.
    """

    def look(_module: Any, _arguments: Any, output: Any) -> None:
        sample = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
        if torch.is_tensor(sample):
            tell(torch.isfinite(sample).all())

    decoder = getattr(vae, "decoder", None)
    if not isinstance(decoder, torch.nn.Module):
        return False
    decoder.register_forward_hook(look)
    return True


@dataclass(frozen=True, slots=True)
class Video:
    """Pictures in time.

    Attributes:
        frames: RGB, `[num_frames, height, width, 3]`.
        fps: Frames in a second.
    """

    frames: NDArray[np.uint8]
    fps: float

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return int(self.frames.shape[0])

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, pixels."""
        return int(self.frames.shape[2]), int(self.frames.shape[1])


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request made.

    Attributes:
        images: RGB, in the order of `seeds`; empty where videos were made.
        videos: In the order of `seeds`; empty where images were made.
        seeds: Seed of each output.
        scheduler: Name of the noise scheduler that ran.
        steps: Denoising steps run, in calls of the scheduler.
        encode_s: Seconds until the first denoising step, waiting for a turn included.
        denoise_s: Seconds of all steps.
        decode_s: Seconds from the last step to the pixels, waiting for a turn included.
        batch_mean: Mean number of requests that shared its denoiser calls, itself included.
        warnings: Sentences for the client.
    """

    images: tuple[Image.Image, ...]
    seeds: tuple[int, ...]
    scheduler: str
    steps: int
    encode_s: float
    denoise_s: float
    decode_s: float
    batch_mean: float = 1.0
    warnings: tuple[str, ...] = ()
    videos: tuple[Video, ...] = ()


def output_of(output: Any, rows: slice, total: int) -> Any:
    """Return some rows of a pipeline's output, which has so many in all.

    Raises:
        ValueError: It has not so many.
    """
    own = copy.copy(output)
    for name, made in output.items():
        if made is not None and len(made) != total:
            raise ValueError(f"{len(made)} {name} were made for {total} outputs")
        own[name] = None if made is None else made[rows]
    return own


def images_in(output: Any) -> Any:
    """Return the images of a pipeline's output, whatever it calls them."""
    return _made_in(output, IMAGE_FIELDS)


def frames_in(output: Any) -> Any:
    """Return the videos of a pipeline's output, whatever it calls them."""
    made = _made_in(output, VIDEO_FIELDS)
    return made[None] if SINGLE_VIDEO_FIELD in output else made


def _made_in(output: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if name in output:
            return output[name]
    raise ValueError(f"{type(output).__name__} has no {names[0]}")


def to_images(pixels: Any, *, watched: bool = False) -> tuple[Image.Image, ...]:
    """Turn `[n, height, width, 3]` floats from 0 to 1 into images.

    Raises:
        NonFiniteOutput: NaN or infinity is among them; not looked for where the decoder was
            `watched`.
    """
    if isinstance(pixels, list):  # pasted into the picture that was given
        return tuple(each.convert("RGB") for each in pixels)
    return tuple(map(Image.fromarray, _to_bytes(pixels, watched=watched)))


def byte_frames(pipe: Any) -> VideoProcessor | None:
    """Return the video processor of a pipeline, making bytes of frames where they are.

    They are the bytes that :func:`to_videos` makes of floats, a quarter as many to move to the
    host. None where the pipeline has no such processor, or checks the floats for what is unsafe.
    """
    processor = getattr(pipe, "video_processor", None)
    plain = getattr(type(processor), "pt_to_numpy", None) is VideoProcessor.pt_to_numpy
    if not plain or getattr(pipe, "safety_checker", None) is not None:
        return None
    own = copy.copy(processor)
    put(own, "pt_to_numpy", _frame_bytes)
    return own


def _frame_bytes(frames: torch.Tensor) -> NDArray[np.uint8]:
    count, channels, height, width = frames.shape
    pixels = frames.new_empty((count, height, width, channels), dtype=torch.uint8)
    for frame, made in zip(frames, pixels, strict=True):  # one by one, for floats take memory
        made.copy_((frame.float() * 255).round_().permute(1, 2, 0))
    found: NDArray[np.uint8] = pixels.cpu().numpy()
    return found


def to_videos(pixels: Any, fps: float) -> tuple[Video, ...]:
    """Turn `[n, num_frames, height, width, 3]` bytes, or floats from 0 to 1, into videos.

    Raises:
        NonFiniteOutput: NaN or infinity is among them.
    """
    return tuple(Video(_to_bytes(each), fps) for each in pixels)


def output_warnings(
    output: Any, made: tuple[Image.Image, ...] | tuple[Video, ...], parameters: Parameters
) -> list[str]:
    """Return sentences where the output is not what was asked for."""
    warnings = []
    asked = (parameters.width, parameters.height)
    if made[0].size != asked:
        size = "x".join(map(str, made[0].size))
        warnings.append(
            f"the size is {size}, because the pipeline cannot make {asked[0]}x{asked[1]}"
        )
    frames = getattr(made[0], "num_frames", None)
    if frames != parameters.num_frames and frames is not None:
        warnings.append(
            f"there are {frames} frames, because the pipeline cannot make {parameters.num_frames}"
        )
    for index, flagged in enumerate(output.get("nsfw_content_detected") or ()):
        if flagged:
            warnings.append(f"the safety checker of the model blacked out output {index}")
    return warnings


def _to_bytes(pixels: Any, *, watched: bool = False) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        made: NDArray[np.uint8] = pixels
        return made
    if not watched and not np.isfinite(pixels).all():
        raise NonFiniteOutput(
            "the autoencoder gave NaN or infinity; another dtype (bfloat16 or float32) may help"
        )
    rounded: NDArray[np.uint8] = (pixels * 255).round().astype(np.uint8)
    return rounded
