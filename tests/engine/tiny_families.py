"""The text-to-image families whose pipelines run without an engine in the tests."""

from typing import Any

import torch

from scripts.lab.families import FAMILIES as ALL
from scripts.lab.families import save_family

__all__ = ["FAMILIES", "picture_of", "save_family"]

FAMILIES = {
    name: ALL[name]
    for name in ("stable_diffusion", "stable_diffusion_xl", "stable_diffusion_3", "flux", "pixart")
}


def picture_of(pipe: Any) -> bytes:
    """What the bare pipeline makes, in two steps."""
    made = pipe(
        "a star",
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
        height=64,
        width=64,
    )
    return bytes(made.images.tobytes())
