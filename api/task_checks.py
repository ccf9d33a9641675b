"""What belongs to some tasks only: strength, frames, frames in a second, the format of the file.

Fills in what was left out and names what does not fit. Does not know input images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from api.catalog import ServedModel
from api.model_limits import max_frames
from configs.errors import FieldError
from configs.settings import Settings
from routing.formats import IMAGE_FORMATS, VIDEO_FORMATS
from routing.parameters import Abilities
from routing.tasks import IMAGE_TASKS, IMAGE_TO_IMAGE, IMAGE_TO_VIDEO, VIDEO_TASKS

_MAX_FPS: Final = 120
_VIDEO_FIELDS: Final = ("num_frames", "fps")


def formats_of(task: str) -> tuple[str, ...]:
    """Return the file formats of a task's outputs, its usual one first."""
    return VIDEO_FORMATS if task in VIDEO_TASKS else IMAGE_FORMATS


def all_formats(abilities: Abilities) -> list[str]:
    """Return the file formats of all tasks of a model."""
    kinds = ((IMAGE_TASKS, IMAGE_FORMATS), (VIDEO_TASKS, VIDEO_FORMATS))
    return [form for tasks, forms in kinds if tasks & set(abilities.tasks) for form in forms]


def task_defaults(task: str, abilities: Abilities) -> dict[str, Any]:
    """Return the defaults of the fields that this task has and others have not."""
    defaults: dict[str, Any] = {}
    if task in VIDEO_TASKS:
        defaults = {"num_frames": abilities.default_frames, "fps": abilities.default_fps}
    elif task == IMAGE_TO_IMAGE and abilities.strength:
        # Inpainting has another default, of each pipeline's own.
        defaults = {"strength": abilities.default_strength}
    return {"output_format": formats_of(task)[0], **defaults}


def untaken(task: str, abilities: Abilities) -> set[str]:
    """Return the fields that this task of the model takes none of."""
    names = set() if task in VIDEO_TASKS else set(_VIDEO_FIELDS)
    if not abilities.takes_strength(task):
        names.add("strength")
    return names


def task_errors(
    values: Mapping[str, Any], model: ServedModel, settings: Settings
) -> Iterator[FieldError]:
    """Yield one error for each of these fields that is wrong."""
    task = values["task"]
    if task not in model.abilities.tasks:
        return  # which is an error of its own
    for name in sorted(untaken(task, model.abilities)):
        if values.get(name) is not None:
            yield FieldError(name, f"{task} of {model.name!r} takes none; leave it out")
    form, known = values["output_format"], formats_of(task)
    if form not in known:
        yield FieldError("output_format", f"{form} is none of {task}; known are {', '.join(known)}")
    if "strength" not in untaken(task, model.abilities):
        yield from _strength_errors(values)
    if task in VIDEO_TASKS:
        yield from _video_errors(values, model, settings)


def _strength_errors(values: Mapping[str, Any]) -> Iterator[FieldError]:
    strength, steps = values.get("strength"), values["num_inference_steps"]
    if strength is None:
        return
    if not 0 <= strength <= 1:
        yield FieldError("strength", f"{strength:.6g} is not from 0 to 1")
    elif steps >= 1 and int(strength * steps) < 1:
        yield FieldError(
            "strength",
            f"{strength:.6g} of {steps} steps is less than one step; give {1 / steps:.3g} or more,"
            " or more steps",
        )


def _video_errors(
    values: Mapping[str, Any], model: ServedModel, settings: Settings
) -> Iterator[FieldError]:
    frames, step, fps = values["num_frames"], model.abilities.frames_step, values["fps"]
    most = max_frames(model, settings)
    if not 1 <= frames <= most:
        yield FieldError("num_frames", f"{_short(frames)} is not from 1 to {most}")
    elif (frames - 1) % step:
        below = frames - (frames - 1) % step
        yield FieldError(
            "num_frames",
            f"{frames} is not 1 and a multiple of {step} more; give {below} or {below + step}",
        )
    elif frames == 1 and values["task"] == IMAGE_TO_VIDEO:
        yield FieldError(
            "num_frames", f"1 frame would be the image that was given; give {1 + step} or more"
        )
    elif frames * max(values["width"], 0) * max(values["height"], 0) > settings.max_video_pixels:
        yield FieldError(
            "num_frames",
            f"{frames} frames of {_short(values['width'])} x {_short(values['height'])} are more "
            f"than {settings.max_video_pixels} pixels; ask for fewer or smaller ones",
        )
    if not 1 <= fps <= _MAX_FPS:
        yield FieldError("fps", f"{fps:.6g} is not from 1 to {_MAX_FPS}")


def _short(number: int) -> str:
    text = str(number)
    return text if len(text) <= len(str(2**63)) else f"{text[:20]}..."
