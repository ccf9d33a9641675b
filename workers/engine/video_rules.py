"""How many frames a video pipeline makes, and how many of them are a second.

Read from the pipeline itself, as the other abilities are. Knows nothing of requests.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from configs.errors import ModelLoadFailed
from workers.devices.device_chunk import denoisers
from workers.engine.pipeline_arguments import FRAME_COUNTS, FRAME_RATES, arguments_of, default_of

# Of a video, where nothing says what the model was trained for.
DEFAULT_FPS = 16.0
_USUAL_FRAMES = 49
_TEMPORAL_SCALES = (
    "vae_scale_factor_temporal",
    "vae_temporal_compression_ratio",
    "vae_temporal_scale_factor",
)
# What diffusers' own examples of a family write, by the beginning of its class; the longer one
# first. Only where the call has no argument for it.
_EXAMPLE_FPS = {
    "Allegro": 15.0,
    "AnimateDiff": 8.0,
    "CogVideoX": 8.0,
    "EasyAnimate": 8.0,
    "Helios": 24.0,
    "HunyuanVideo15": 24.0,
    "HunyuanVideo": 15.0,
    "Kandinsky5": 24.0,
    "Latte": 8.0,
    "Mochi": 30.0,
    "MotifVideo": 24.0,
    "SkyReels": 24.0,
}


def inspect_frames(pipe: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the abilities of a video pipeline that images do not have; empty for images.

    A video has one frame and a multiple of what its autoencoder makes of one latent, so that the
    pipeline need not round; Allegro's own number shows that it counts otherwise. Denoisers that
    learnt a place for each frame take no more than they learnt (AnimateDiff), or one frame or
    exactly so many (Latte).

    Raises:
        ModelLoadFailed: `defaults`, those of the stage, name a number that does not fit.
    """
    taken = arguments_of(type(pipe))
    name = next((name for name in FRAME_COUNTS if name in taken), None)
    if name is None:
        return {}
    config = getattr(next(iter(denoisers(pipe).values()), None), "config", {})
    own = default_of(taken, name) or config.get("sample_frames")
    step = _temporal_scale_factor(pipe)
    if own and own % step != 1 % step:
        step = 1
    places = config.get("video_length")
    if places:
        step = max(places - 1, 1)
    most = places or config.get("motion_max_seq_length")
    usual = own or _USUAL_FRAMES
    frames = defaults.get("num_frames") or (min(usual, most) if most else usual)
    if defaults.get("num_frames") and frames % step != 1 % step:
        raise ModelLoadFailed(
            f"default_sampling_params.num_frames: {frames} is not 1 and a multiple of {step} more,"
            f" as {type(pipe).__name__} needs it"
        )
    if most and frames > most:
        raise ModelLoadFailed(
            f"default_sampling_params.num_frames: {frames} is more than the {most} frames that"
            f" {type(pipe).__name__} makes with these weights"
        )
    return {
        "max_frames": most,
        "default_frames": int(frames),
        "frames_step": step,
        "default_fps": float(defaults.get("fps") or _own_fps(pipe, taken)),
    }


def _temporal_scale_factor(pipe: Any) -> int:
    """Frames for one latent of the autoencoder; 1 where each frame has its own."""
    factors = (getattr(pipe, name, None) for name in _TEMPORAL_SCALES)
    return int(next((factor for factor in factors if factor), 1))


def _own_fps(pipe: Any, taken: Mapping[str, inspect.Parameter]) -> float:
    for name in FRAME_RATES:
        if default_of(taken, name):
            return float(default_of(taken, name))
    if pipe.config.get("expand_timesteps"):
        return 24.0  # Wan 2.2 5B; the others of that class 16
    name = type(pipe).__name__
    return next((fps for start, fps in _EXAMPLE_FPS.items() if name.startswith(start)), DEFAULT_FPS)
