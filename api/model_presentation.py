"""Models as clients see them: what each takes, within which limits, and its defaults.

Joins what its replicas published with what this service allows. Does not read anything itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.catalog import ServedModel
from api.model_limits import max_frames, max_pixels
from api.parameter_checks import MAX_SEED
from api.task_checks import all_formats
from configs.settings import Settings
from routing.parameters import Abilities
from routing.replica import Replica, ReplicaState
from routing.tasks import FROM_IMAGE_TASKS, INPAINT


def model_object(
    model: ServedModel, replicas: Sequence[Replica], settings: Settings
) -> dict[str, Any]:
    """Return a model as OpenAI lists it, with what it can do; `replicas` are those that have it."""
    abilities = model.abilities
    ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
    return {
        "id": model.name,
        "object": "model",
        "created": int(min((replica.heartbeat.started_at for replica in replicas), default=0)),
        "owned_by": "diffusion-replicas",
        "ready_replicas": len(ready),
        "tasks": list(abilities.tasks),
        "size_multiple": abilities.size_multiple,
        "schedulers": list(abilities.schedulers),
        "full_run_schedulers": list(abilities.full_run_schedulers),
        "loras": list(abilities.loras),
        "frames_step": abilities.frames_step if _makes_videos(abilities) else None,
        "output_formats": all_formats(abilities),
        "takes": _takes(abilities),
        "limits": _limits(model, settings),
        "defaults": {
            **model.defaults,
            "width": abilities.default_width,
            "height": abilities.default_height,
            "num_inference_steps": abilities.default_steps,
            "guidance_scale": abilities.default_guidance_scale,
            **_default_parts(abilities),
        },
    }


def _makes_videos(abilities: Abilities) -> bool:
    return abilities.default_frames is not None


def _takes(abilities: Abilities) -> dict[str, bool]:
    """Which of the parameters that not all models take this one does."""
    return {
        "negative_prompt": abilities.negative_prompt,
        "guidance_scale": abilities.guidance_scale,
        "true_cfg_scale": abilities.true_cfg_scale,
        "image": bool(FROM_IMAGE_TASKS & set(abilities.tasks)),
        "mask_image": INPAINT in abilities.tasks,
        "strength": abilities.strength,
        "num_frames": _makes_videos(abilities),
        "fps": _makes_videos(abilities),
        "preview": abilities.preview,
    }


def _limits(model: ServedModel, settings: Settings) -> dict[str, int | None]:
    video = _makes_videos(model.abilities)
    return {
        "max_pixels": max_pixels(model, settings),
        "num_inference_steps": settings.max_steps,
        "num_outputs_per_prompt": settings.max_outputs,
        "images": model.abilities.max_images,
        "num_frames": max_frames(model, settings) if video else None,
        "video_pixels": settings.max_video_pixels if video else None,
        "prompt_characters": settings.max_prompt_chars,
        "prompt_tokens": model.abilities.max_prompt_tokens,
        "seed": MAX_SEED,
    }


def _default_parts(abilities: Abilities) -> dict[str, Any]:
    """The defaults of what only some models take."""
    parts = {
        "strength": abilities.default_strength,
        "num_frames": abilities.default_frames,
        "fps": abilities.default_fps,
    }
    return {name: value for name, value in parts.items() if value is not None}
