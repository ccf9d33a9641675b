"""Every family that is tried as a tiny pipeline, by name, and how one is saved to a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.lab.image_families import (
    flux,
    flux_kontext,
    pixart,
    qwen_image,
    qwen_image_edit,
    sana,
    stable_diffusion,
    stable_diffusion_3,
    stable_diffusion_xl,
    z_image,
)
from scripts.lab.video_families import latte, ltx, wan, wan_image_to_video

FAMILIES: dict[str, Callable[[], Any]] = {
    builder.__name__: builder
    for builder in (
        stable_diffusion,
        stable_diffusion_xl,
        stable_diffusion_3,
        flux,
        flux_kontext,
        qwen_image,
        qwen_image_edit,
        pixart,
        sana,
        z_image,
        wan,
        wan_image_to_video,
        ltx,
        latte,
    )
}


def save_family(name: str, folder: Path) -> Path:
    """Make the pipeline of that family with weights that are always the same, and save it."""
    torch.manual_seed(0)
    FAMILIES[name]().save_pretrained(folder)
    # As the real models have it, whose processor is that of transformers.
    index = folder / "model_index.json"
    parts = json.loads(index.read_text())
    if "processor" in parts:
        parts["processor"] = ["transformers", "Qwen2VLProcessor"]
        index.write_text(json.dumps(parts))
    return folder
