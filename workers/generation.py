"""What a run made: the images, and what there is to say about them. Knows no pipeline."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from configs.errors import NonFiniteOutput
from routing.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request made.

    Attributes:
        images: RGB, in the order of `seeds`.
        seeds: Seed of each image.
        scheduler: Name of the noise scheduler that ran.
        steps: Denoising steps run, in calls of the scheduler.
        encode_s: Seconds until the first denoising step, waiting for a turn included.
        denoise_s: Seconds of all steps.
        decode_s: Seconds from the last step to the images, waiting for a turn included.
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


def to_images(pixels: Any) -> tuple[Image.Image, ...]:
    """Turn `[n, height, width, 3]` floats from 0 to 1 into images; raises NonFiniteOutput."""
    if not np.isfinite(pixels).all():
        raise NonFiniteOutput(
            "the autoencoder gave NaN or infinity; another dtype (bfloat16 or float32) may help"
        )
    return tuple(Image.fromarray(each) for each in (pixels * 255).round().astype(np.uint8))


def output_warnings(
    output: Any, images: tuple[Image.Image, ...], parameters: Parameters
) -> list[str]:
    """Return sentences where the output is not what was asked for."""
    warnings = []
    asked = (parameters.width, parameters.height)
    if images[0].size != asked:
        made = "x".join(map(str, images[0].size))
        warnings.append(f"the size is {made}, for the pipeline cannot make {asked[0]}x{asked[1]}")
    for index, flagged in enumerate(output.get("nsfw_content_detected") or ()):
        if flagged:
            warnings.append(f"output {index} was blacked out by the safety checker of the model")
    return warnings
