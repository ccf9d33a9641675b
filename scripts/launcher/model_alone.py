"""The stage of a model that is served without a stage file, by its weights and this host's GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from configs.fields import counted
from configs.known_models import KnownModel, SavedAs, find_known_model

Offload = Literal["enable_cpu_offload", "enable_layerwise_offload"]

# What is left of a GPU's memory beside the weights, for the work itself: so many bytes, or such a
# part of a small GPU. A video needs more (Wan 2.2, with weights of 69 GB, is published as "80 GB
# with offloading"). Estimates, for want of a GPU to measure on.
_STILL_WORK: Final = (6e9, 0.3)
_VIDEO_WORK: Final = (20e9, 0.4)
_NEXT_REQUEST: Final = 3e9  # of a request that shares steps
_MOST_SHARING: Final = 4
_HOST_SHARE: Final = 0.8

_DENOISERS: Final = ("transformer", "transformer_2", "unet", "prior")
_SMALL_DENOISER: Final = 6e9
_SMALL_PICTURE: Final = 768 * 768


@dataclass(frozen=True)
class Weights:
    """What is known of a model before it is loaded.

    Attributes:
        parts: Bytes of each part's weights.
        video: Whether it makes videos.
        pixels: Of the pictures it makes where a request says nothing.
    """

    parts: Mapping[str, float]
    video: bool = False
    pixels: int = 1024 * 1024

    @property
    def total(self) -> float:
        """Bytes of all of them."""
        return sum(self.parts.values())

    @property
    def largest(self) -> float:
        """Bytes of the largest part."""
        return max(self.parts.values())


@dataclass(frozen=True)
class Fit:
    """How a model fits into GPUs.

    Attributes:
        replicas: How many of it.
        gpus_each: GPUs of one replica; with several its parts are spread over them.
        offload: The key of `engine_args` that keeps weights on the host, if they must be there.
        max_num_seqs: Requests that share steps.
    """

    replicas: int
    gpus_each: int = 1
    offload: Offload | None = None
    max_num_seqs: int = 1

    @property
    def engine_args(self) -> dict[str, Any]:
        """These, as a stage file says them."""
        args: dict[str, Any] = {"max_num_seqs": self.max_num_seqs}
        if self.offload:
            args[self.offload] = True
        if self.gpus_each > 1:
            args["parallel_config"] = {"world_size": self.gpus_each, "device_map": "balanced"}
        return args


def weights_of(model: str) -> Weights | None:
    """Return the weights of a hub id or a folder; None where they are not known.

    They are those of the table of known models or of the safetensors files of a folder; the fewer
    where both are known, since files may be of more bits than are loaded.
    """
    folder = Path(model).expanduser()
    index = _index(folder)
    found = find_known_model([model.rstrip("/")], SavedAs(str(index.get("_class_name", ""))))
    known = _known(found[0]) if found is not None else Weights({})
    files: dict[str, float] = {}
    for each in folder.glob("*/*.safetensors") if index else ():
        if ".fp16." not in each.name and ".non_ema." not in each.name:
            files[each.parent.name] = files.get(each.parent.name, 0) + each.stat().st_size
    parts = min(filter(None, (known.parts, files)), key=lambda each: sum(each.values()), default={})
    return replace(known, parts=parts) if parts else None


def fit(weights: Weights | None, gpus: int, gpu_bytes: int | None, host_bytes: int) -> Fit:
    """Return how many replicas `gpus` GPUs can hold, each of `gpu_bytes` of memory.

    One for each GPU where the model fits into one. Else its parts are spread over as few GPUs as
    hold them; with too few of these, its weights are kept on the host, part by part or, where not
    even the largest part fits, block by block. What is not known is taken to fit.
    """
    if weights is None or gpu_bytes is None:
        return Fit(gpus)
    work, share = _VIDEO_WORK if weights.video else _STILL_WORK
    room = gpu_bytes - min(work, share * gpu_bytes)
    if weights.total <= room:
        return Fit(gpus, max_num_seqs=_sharing(weights, room))
    for each in range(2, gpus + 1):
        if _fullest(weights, each) <= room:
            return Fit(gpus // each, gpus_each=each)
    # The host has a copy of the weights for each replica.
    replicas = max(1, min(gpus, int(host_bytes * _HOST_SHARE / weights.total)))
    if weights.largest <= room:
        return Fit(replicas, offload="enable_cpu_offload")
    # Each step brings all blocks to the GPU, once for all requests that share it.
    sharing = 1 if weights.video else _at_most(_MOST_SHARING, room)
    return Fit(replicas, offload="enable_layerwise_offload", max_num_seqs=sharing)


def stage_document(model: str, fitting: Fit) -> dict[str, Any]:
    """Return the stage file of a model alone."""
    count = fitting.replicas * fitting.gpus_each
    return {
        "stages": [
            {
                "stage_id": 0,
                "stage_type": "diffusion",
                "runtime": {"devices": list(range(count)), "num_replicas": fitting.replicas},
                "engine_args": {"model": model, **fitting.engine_args},
            }
        ]
    }


def account(model: str, weights: Weights | None, gpu_bytes: int | None, fitting: Fit) -> str:
    """Say in one line what was chosen, and of what."""
    size = f"{weights.total / 1e9:.1f} GB" if weights else "an unknown size"
    memory = f" with {gpu_bytes / 1e9:.1f} GB" if gpu_bytes else ""
    each = counted(fitting.gpus_each, "GPU")
    how = f", {fitting.offload}" if fitting.offload else ""
    how = f"{how}, its parts spread over them" if fitting.gpus_each > 1 else how
    sharing = f", max_num_seqs {fitting.max_num_seqs}" if fitting.max_num_seqs > 1 else ""
    return (
        f"no stage file: {model} has weights of {size}; "
        f"{counted(fitting.replicas, 'replica')} of {each}{memory} each{how}{sharing}"
    )


def _index(folder: Path) -> Mapping[str, Any]:
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, Mapping) else {}


def _known(model: KnownModel) -> Weights:
    sampling = {name: figure.value for name, figure in model.sampling.items()}
    return Weights(
        {part: size * 1e9 for part, size in model.part_gb.items()},
        video="num_frames" in sampling,
        pixels=sampling.get("width", 1024) * sampling.get("height", 1024),
    )


def _fullest(weights: Weights, gpus: int) -> float:
    """Bytes on the fullest of the GPUs over which diffusers spreads the parts.

    It deals them out by size, the largest first, to the first GPU, the second and so on, and back:
    `_assign_components_to_devices` in its pipelines/pipeline_loading_utils.py.
    """
    filled = [0.0] * gpus
    turns = [*range(gpus), *reversed(range(gpus))]
    for place, size in enumerate(sorted(weights.parts.values(), reverse=True)):
        filled[turns[place % len(turns)]] += size
    return max(filled)


def _sharing(weights: Weights, room: float) -> int:
    """How many requests share steps where the whole model is on the GPU.

    Pictures of 1024 pixels fill a GPU one by one (Qwen-Image on an H200: two in the time of 1.96;
    of 512 pixels four in that of 1.44, https://github.com/sgl-project/sglang/pull/22183).
    """
    denoiser = max((weights.parts.get(name, 0) for name in _DENOISERS), default=0)
    if weights.video or not 0 < denoiser <= _SMALL_DENOISER:
        return 1
    most = _MOST_SHARING if weights.pixels <= _SMALL_PICTURE else 2
    return _at_most(most, room - weights.total)


def _at_most(count: int, free: float) -> int:
    """So many requests, or as many as there is memory for."""
    return min(count, 1 + int(free / _NEXT_REQUEST))
