"""How the parameters of a request become the arguments of a pipeline's call.

Knows names of diffusers' arguments, and no family.
"""

from collections.abc import Collection
from typing import Any

import torch

from routing.parameters import Parameters
from workers.inputs import Inputs

# Passed only where the pipeline takes them.
_OPTIONAL = ("negative_prompt", "guidance_scale", "true_cfg_scale", "strength", "num_frames")
# Names for frames in a second; where there is none the model does not see them.
_FRAME_RATES = ("frame_rate", "fps")
_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")


def call_arguments(
    parameters: Parameters, taken: Collection[str], inputs: Inputs | None = None
) -> dict[str, Any]:
    """Return the arguments for a pipeline that takes those named in `taken`."""
    arguments: dict[str, Any] = {
        "prompt": parameters.prompt,
        "num_inference_steps": parameters.num_inference_steps,
        "generator": [torch.Generator("cpu").manual_seed(seed) for seed in parameters.seeds()],
        "output_type": "np",
    }
    for name in ("width", "height", *_OPTIONAL):
        if name in taken and getattr(parameters, name) is not None:
            arguments[name] = getattr(parameters, name)
    if parameters.fps is not None:
        arguments |= dict.fromkeys(set(_FRAME_RATES) & set(taken), parameters.fps)
    if "max_area" in taken:
        # FLUX Kontext scales every size to this many pixels.
        arguments["max_area"] = parameters.width * parameters.height
    arguments |= _input_arguments(parameters, taken, inputs or Inputs())
    return arguments | _count_arguments(parameters, taken)


def left_out(parameters: Parameters, taken: Collection[str]) -> list[str]:
    """Return the parameters that are set and that the pipeline does not take."""
    return [
        name for name in _OPTIONAL if name not in taken and getattr(parameters, name) is not None
    ]


def is_edit(taken: Collection[str]) -> bool:
    """Tell whether an image pipeline reads its image, rather than starting from its pixels."""
    return "image" in taken and not {"strength", "mask_image", "num_frames"} & set(taken)


def _input_arguments(
    parameters: Parameters, taken: Collection[str], inputs: Inputs
) -> dict[str, Any]:
    if not inputs.images:
        return {}
    if not is_edit(taken):
        # Those that start from the pixels would stretch them, or make another size than asked.
        inputs = inputs.fitted(parameters.width, parameters.height)
    images = inputs.images
    arguments: dict[str, Any] = {"image": images[0] if len(images) == 1 else list(images)}
    if inputs.mask is not None:
        arguments["mask_image"] = inputs.mask
    return arguments


def _count_arguments(parameters: Parameters, taken: Collection[str]) -> dict[str, Any]:
    count = parameters.num_outputs_per_prompt
    for name in _COUNTS:
        if name in taken:
            return {name: count}
    if count == 1:
        return {}
    lists: dict[str, Any] = {"prompt": [parameters.prompt] * count}
    if "negative_prompt" in taken and parameters.negative_prompt is not None:
        lists["negative_prompt"] = [parameters.negative_prompt] * count
    return lists
