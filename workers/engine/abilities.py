"""What a loaded pipeline can do, read from the pipeline itself."""

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.errors import ModelLoadFailed
from configs.fields import Parameter, choices, nearest
from configs.parameters import ARGUMENTS, FROM_IMAGE_TASKS, PARAMETERS, Abilities
from workers.devices.chunk import denoisers
from workers.engine.arguments import arguments_of, default_negative_prompt, default_of
from workers.engine.loading.scheduler_check import right_schedulers
from workers.engine.pipelines import max_prompt_tokens, task_classes
from workers.engine.schedulers import (
    from_first_step,
    most_steps,
    nearest_scheduler,
)
from workers.families import (
    FRAME_COUNTS,
    FRAME_RATES,
    SPATIAL_SCALES,
    TEMPORAL_SCALES,
    family_of,
)

logger = logging.getLogger(__name__)

_USUAL_FRAMES = 49


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
    own = own or getattr(pipe, "default_frames", None) or family_of(pipe).frames
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
            f" which {type(pipe).__name__} needs"
        )
    if most and frames > most:
        raise ModelLoadFailed(
            f"default_sampling_params.num_frames: {frames} is more than the {most} frames that"
            f" {type(pipe).__name__} can make with these weights"
        )
    return {
        "max_frames": most,
        "default_frames": int(frames),
        "frames_step": step,
        "default_fps": float(defaults.get("fps") or _own_fps(pipe, taken)),
    }


def _temporal_scale_factor(pipe: Any) -> int:
    """Frames for one latent of the autoencoder; 1 where each frame has its own."""
    factors = (getattr(pipe, name, None) for name in TEMPORAL_SCALES)
    return int(next((factor for factor in factors if factor), 1))


def _own_fps(pipe: Any, taken: Mapping[str, inspect.Parameter]) -> float:
    for name in FRAME_RATES:
        if default_of(taken, name):
            return float(default_of(taken, name))
    return family_of(pipe).fps


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
    true_cfg_scale = defaults.get("true_cfg_scale", default_of(taken, "true_cfg_scale"))
    schedulers = right_schedulers(pipe.scheduler, classes.values())
    multiple = size_multiple(pipe)
    width, height = _default_size(pipe, multiple)
    steps = defaults.get("num_inference_steps") or default_of(taken, "num_inference_steps") or 50
    for name in ("width", "height"):
        if defaults.get(name) and defaults[name] % multiple:
            raise ModelLoadFailed(
                f"default_sampling_params.{name}: {defaults[name]} is not a multiple of {multiple},"
                f" which {type(pipe).__name__} needs"
            )
    supported: dict[str, Any] = {
        **{PARAMETERS[name].ability: _has(classes, taken, PARAMETERS[name]) for name in ARGUMENTS},
        **_text_limits(pipe, taken),
        "guidance_scale": guided,
        # Without a boundary there is one denoiser, and Wan refuses a second weight.
        "guidance_scale_2": "guidance_scale_2" in taken
        and pipe.config.get("boundary_ratio") is not None,
        "strength": bool(strengths),
    }
    return Abilities(
        tasks=tuple(classes),
        size_multiple=multiple,
        default_width=int(defaults.get("width") or width),
        default_height=int(defaults.get("height") or height),
        default_steps=int(steps),
        default_guidance_scale=defaults.get("guidance_scale", default_of(taken, "guidance_scale"))
        if guided
        else None,
        default_true_cfg_scale=true_cfg_scale if "true_cfg_scale" in taken else None,
        default_negative_prompt=defaults.get(
            "negative_prompt", default_negative_prompt(taken, true_cfg_scale)
        )
        if "negative_prompt" in taken
        else None,
        schedulers=schedulers,
        full_run_schedulers=from_first_step(schedulers),
        scheduler_steps=most_steps(pipe.scheduler, schedulers),
        default_lora=tuple(defaults["lora"]) if defaults.get("lora") else None,
        max_prompt_tokens=max_prompt_tokens(pipe),
        **inspect_frames(pipe, defaults),
        max_images=_max_images(classes),
        default_strength=defaults.get("strength", strengths[0]) if strengths else None,
        **supported,
    )


def _has(
    classes: Mapping[str, Any], taken: Mapping[str, inspect.Parameter], parameter: Parameter
) -> bool:
    """Tell whether the call has an argument of that name, in any of the tasks that have it."""
    if parameter.tasks is None:
        return parameter.name in taken
    return any(
        parameter.name in arguments_of(found)
        for task, found in classes.items()
        if task in parameter.tasks
    )


def _text_limits(pipe: Any, taken: Mapping[str, inspect.Parameter]) -> dict[str, int]:
    """The most layers that may be left out of the text encoders, and the most tokens of a text."""
    layers = (
        _layers(part) for name, part in pipe.components.items() if name.startswith("text_encoder")
    )
    clip_skip = min((each - 1 for each in layers if each), default=0) if "clip_skip" in taken else 0
    tokens = 0
    if "max_sequence_length" in taken:
        own = default_of(taken, "max_sequence_length")
        tokens = max(family_of(pipe).most_sequence or 0, own if isinstance(own, int) else 0)
    return {"clip_skip": clip_skip, "max_sequence_length": tokens}


def _layers(encoder: Any) -> int | None:
    config = getattr(encoder, "config", None)
    found: int | None = getattr(config, "num_hidden_layers", None)
    return found


def refuse_unfit_defaults(abilities: Abilities, staged: Mapping[str, Any]) -> None:
    """Refuse defaults of a stage that no request could have; warn of those that do nothing.

    Raises:
        ModelLoadFailed: `default_sampling_params` names what the model does not have.
    """
    where = "default_sampling_params"
    name = staged.get("scheduler")
    if name is not None and name not in abilities.schedulers:
        raise ModelLoadFailed(
            f"{where}.scheduler: {_unfit(name, abilities.schedulers, nearest_scheduler)}"
            " (engine_args.scheduler replaces the model's own)"
        )
    for lora in staged.get("lora", ()):
        if not abilities.loras:
            raise ModelLoadFailed(
                f"{where}.lora: there is no adapter {lora['name']!r}; this stage has none: add it"
                " to engine_args.lora_modules"
            )
        if lora["name"] not in abilities.loras:
            raise ModelLoadFailed(f"{where}.lora: {_unfit(lora['name'], abilities.loras, nearest)}")
    most = abilities.scheduler_steps.get(name or abilities.schedulers[0])
    if most is not None and abilities.default_steps > most:
        raise ModelLoadFailed(
            f"{where}.num_inference_steps: {abilities.default_steps} is more than the {most} steps"
            f" that {name or abilities.schedulers[0]} has; set it to {most} or less"
        )
    for each, parameter in PARAMETERS.items():
        own = abilities.most(parameter) if parameter.argument else None
        if own is not None and (staged.get(each) or 0) > own:
            raise ModelLoadFailed(
                f"{where}.{each}: {staged[each]} is more than the {own} {parameter.unit} that this"
                f" model has; set it to {own} or less"
            )
        if not parameter.argument or not parameter.off:
            continue
        if not getattr(abilities, parameter.ability) and staged.get(each, 0) not in parameter.off:
            logger.warning("%s.%s: %s does nothing with this model", where, each, staged[each])


def _unfit(
    name: str, known: Sequence[str], find: Callable[[str, Sequence[str]], str | None]
) -> str:
    near = find(name, known)
    meant = f"did you mean {near}? " if near else ""
    return f"{name!r} is not available with this model; {meant}use {choices(known)}"


def _max_images(classes: Mapping[str, Any]) -> int:
    if not FROM_IMAGE_TASKS & classes.keys():
        return 0
    return max(family_of(found).max_images for found in classes.values())


def size_multiple(pipe: Any) -> int:
    """Return what width and height must be multiples of, in pixels, to come out as asked.

    That is the autoencoder's downscaling times the patch of the denoiser. Where the pipeline packs
    2 x 2 latents into a token (Flux, Qwen-Image) its image processor or its packing says so.
    """
    processor = getattr(getattr(pipe, "image_processor", None), "config", {})
    packs = hasattr(pipe, "_unpack_latents") and not hasattr(pipe, "transformer_spatial_patch_size")
    patch = max(_patch_size(pipe), 2 if packs else 1)
    patch *= family_of(pipe).patches_per_token
    return math.lcm(_vae_scale_factor(pipe) * patch, processor.get("vae_scale_factor") or 1)


def _ignores_guidance(pipe: Any, taken: Mapping[str, inspect.Parameter]) -> bool:
    """Qwen-Image and FLUX schnell declare a scale that only guidance-distilled weights read."""
    config = getattr(_denoiser(pipe), "config", {})
    return "true_cfg_scale" in taken and config.get("guidance_embeds") is False


def _vae_scale_factor(pipe: Any) -> int:
    """Pixels for one latent; 1 for pipelines that denoise pixels (DeepFloyd IF)."""
    encoded = any(pipe.components.get(name) is not None for name in ("vae", "movq"))
    factors = (getattr(pipe, name, None) for name in SPATIAL_SCALES)
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
    if hasattr(pipe, "default_width") and hasattr(pipe, "default_height"):  # Mochi
        return int(pipe.default_width), int(pipe.default_height)
    target, shape = getattr(pipe, "target_size", None), getattr(pipe, "default_aspect_ratio", None)
    if target and shape:  # HunyuanVideo 1.5 asks its processor for a size of about target x target
        rows, columns = pipe.video_processor.calculate_default_height_width(*shape[::-1], target)
        return int(columns), int(rows)
    sample = getattr(pipe, "default_sample_size", None)
    config = getattr(_denoiser(pipe), "config", {})
    if config.get("sample_height") and config.get("sample_width"):
        sample = (config["sample_height"], config["sample_width"])
    if sample is None:
        sample = config.get("sample_size")
    if sample is None:
        return 1024, 1024
    rows, columns = sample if isinstance(sample, (list, tuple)) else (sample, sample)
    scale = 1 if family_of(pipe).size_in_pixels else _vae_scale_factor(pipe)
    return _at_least_one(columns * scale, multiple), _at_least_one(rows * scale, multiple)


def _at_least_one(pixels: int, multiple: int) -> int:
    return max(pixels // multiple, 1) * multiple
