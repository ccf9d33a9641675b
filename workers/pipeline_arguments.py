"""How the parameters of a request become the arguments of a pipeline's call.

Knows names of diffusers' arguments, and no family.
"""

from typing import Any

import torch

from routing.parameters import Parameters

# Passed only where the pipeline takes them.
_OPTIONAL = ("negative_prompt", "guidance_scale", "true_cfg_scale")


def call_arguments(parameters: Parameters, taken: frozenset[str]) -> dict[str, Any]:
    """Return the arguments for a pipeline that takes those named in `taken`."""
    arguments = {
        "prompt": parameters.prompt,
        "width": parameters.width,
        "height": parameters.height,
        "num_inference_steps": parameters.num_inference_steps,
        "num_images_per_prompt": parameters.num_outputs_per_prompt,
        "generator": [torch.Generator("cpu").manual_seed(seed) for seed in parameters.seeds()],
        "output_type": "np",
    }
    for name in _OPTIONAL:
        if name in taken and getattr(parameters, name) is not None:
            arguments[name] = getattr(parameters, name)
    return arguments


def left_out(parameters: Parameters, taken: frozenset[str]) -> list[str]:
    """Return the parameters that are set and that the pipeline does not take."""
    return [
        name for name in _OPTIONAL if name not in taken and getattr(parameters, name) is not None
    ]
