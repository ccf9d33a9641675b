"""What a loaded pipeline can do, read from the pipeline itself.

The rules go by attributes and signatures, so that a family diffusers adds tomorrow is likely served
today. They were checked against the size checks of the text-to-image pipelines of diffusers 0.42.
Knows nothing of devices, requests and replicas.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from configs.errors import ModelLoadFailed
from routing.parameters import Abilities
from routing.tasks import FROM_IMAGE_TASKS
from workers.engine.noise_schedulers import from_first_step, offered_schedulers
from workers.engine.pipeline_arguments import arguments_of, default_of
from workers.engine.pipeline_tasks import task_classes
from workers.engine.prompt_limit import max_prompt_tokens
from workers.engine.video_rules import inspect_frames

_SPATIAL_SCALES = (
    "vae_scale_factor",
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
)
# GLM-Image checks for two patches; no attribute says so.
_PATCHES_PER_TOKEN = {"GlmImagePipeline": 2}
# Editing models that read several images at once; no attribute says so, nor how many are sensible.
_SEVERAL_IMAGES = {"QwenImageEditPlusPipeline": 3, "Flux2Pipeline": 10, "Flux2KleinPipeline": 4}


def inspect_abilities(pipe: Any, defaults: Mapping[str, Any]) -> Abilities:
    """Return what `pipe` can do; the stage's `default_sampling_params` come before its own.

    Raises:
        ModelLoadFailed: When the pipeline does nothing that is served here.
    """
    classes = task_classes(pipe)
    taken = arguments_of(type(pipe))
    guided = "guidance_scale" in taken and not _ignores_guidance(pipe, taken)
    strengths = [
        arguments_of(found)["strength"].default
        for found in classes.values()
        if "strength" in arguments_of(found)
    ]
    schedulers = offered_schedulers(pipe.scheduler, classes.values())
    multiple = size_multiple(pipe)
    width, height = _default_size(pipe, multiple)
    steps = defaults.get("num_inference_steps") or default_of(taken, "num_inference_steps") or 50
    for name in ("width", "height"):
        if defaults.get(name) and defaults[name] % multiple:
            raise ModelLoadFailed(
                f"default_sampling_params.{name}: {defaults[name]} is not a multiple of {multiple},"
                f" as {type(pipe).__name__} needs it"
            )
    return Abilities(
        tasks=tuple(classes),
        size_multiple=multiple,
        default_width=int(defaults.get("width") or width),
        default_height=int(defaults.get("height") or height),
        default_steps=int(steps),
        default_guidance_scale=defaults.get("guidance_scale", default_of(taken, "guidance_scale"))
        if guided
        else None,
        negative_prompt="negative_prompt" in taken,
        guidance_scale=guided,
        true_cfg_scale="true_cfg_scale" in taken,
        schedulers=schedulers,
        full_run_schedulers=from_first_step(schedulers),
        max_prompt_tokens=max_prompt_tokens(pipe),
        **inspect_frames(pipe, defaults),
        max_images=_max_images(classes),
        strength=bool(strengths),
        default_strength=defaults.get("strength", strengths[0]) if strengths else None,
    )


def _max_images(classes: Mapping[str, Any]) -> int:
    if not FROM_IMAGE_TASKS & classes.keys():
        return 0
    return max(_SEVERAL_IMAGES.get(found.__name__, 1) for found in classes.values())


def size_multiple(pipe: Any) -> int:
    """Return what width and height must be multiples of, in pixels, to come out as asked.

    That is the autoencoder's downscaling times the patch of the denoiser. Where the pipeline packs
    2 x 2 latents into a token (Flux, Qwen-Image) its image processor or its packing says so.
    """
    processor = getattr(getattr(pipe, "image_processor", None), "config", {})
    packs = hasattr(pipe, "_unpack_latents") and not hasattr(pipe, "transformer_spatial_patch_size")
    patch = max(_patch_size(pipe), 2 if packs else 1)
    patch *= _PATCHES_PER_TOKEN.get(type(pipe).__name__, 1)
    return math.lcm(_vae_scale_factor(pipe) * patch, processor.get("vae_scale_factor") or 1)


def _ignores_guidance(pipe: Any, taken: Mapping[str, inspect.Parameter]) -> bool:
    """Qwen-Image and FLUX schnell declare a scale that only guidance-distilled weights read."""
    config = getattr(_denoiser(pipe), "config", {})
    return "true_cfg_scale" in taken and config.get("guidance_embeds") is False


def _vae_scale_factor(pipe: Any) -> int:
    """Pixels for one latent; 1 for pipelines that denoise pixels (DeepFloyd IF)."""
    encoded = any(pipe.components.get(name) is not None for name in ("vae", "movq"))
    factors = (getattr(pipe, name, None) for name in _SPATIAL_SCALES)
    return int(next((factor for factor in factors if factor), 8 if encoded else 1))


def _patch_size(pipe: Any) -> int:
    config = getattr(_denoiser(pipe), "config", {})
    sizes = [
        getattr(pipe, "patch_size", 1),
        config.get("patch_size") or 1,
        config.get("all_patch_size") or 1,
    ]
    # Tuples are (frames, height, width), or the sizes a model can choose from.
    return max(max(size) if isinstance(size, (list, tuple)) else int(size) for size in sizes)


def _denoiser(pipe: Any) -> Any:
    return getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)


def _default_size(pipe: Any, multiple: int) -> tuple[int, int]:
    """Width and height that the pipeline takes when it is told none, in pixels."""
    taken = arguments_of(type(pipe))
    width, height = default_of(taken, "width"), default_of(taken, "height")
    if isinstance(width, int) and isinstance(height, int):
        return width, height
    sample = getattr(pipe, "default_sample_size", None)
    config = getattr(_denoiser(pipe), "config", {})
    if config.get("sample_height") and config.get("sample_width"):
        sample = (config["sample_height"], config["sample_width"])
    if sample is None:
        sample = config.get("sample_size")
    if sample is None:
        return 1024, 1024
    rows, columns = sample if isinstance(sample, (list, tuple)) else (sample, sample)
    # PRX alone keeps it in its configuration, and in pixels.
    scale = 1 if "default_sample_size" in pipe.config else _vae_scale_factor(pipe)
    return _at_least_one(columns * scale, multiple), _at_least_one(rows * scale, multiple)


def _at_least_one(pixels: int, multiple: int) -> int:
    return max(pixels // multiple, 1) * multiple
