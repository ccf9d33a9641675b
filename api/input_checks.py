"""What input images mean for a request: its task, its size, and what does not fit together.

Works on the names of inputs, which hold their sizes (`api/input_files.py`). Does not know their
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from api.catalog import ServedModel
from api.input_files import input_size
from api.model_limits import max_pixels
from configs.errors import FieldError
from configs.settings import Settings
from routing.parameters import Abilities
from routing.tasks import (
    FROM_IMAGE_TASKS,
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINT,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
    VIDEO_TASKS,
)


def picked_task(given: Mapping[str, Any], abilities: Abilities) -> str:
    """Return the task that the inputs ask for, among those the model has."""
    if given.get("mask_image"):
        fitting: tuple[str, ...] = (INPAINT,)
    elif given.get("image"):
        fitting = (IMAGE_TO_IMAGE, IMAGE_TO_VIDEO)
    else:
        fitting = (TEXT_TO_IMAGE, TEXT_TO_VIDEO)
    return next((task for task in fitting if task in abilities.tasks), abilities.tasks[0])


def default_size(
    given: Mapping[str, Any], task: str, model: ServedModel, settings: Settings
) -> tuple[int, int]:
    """Return width and height for a request that names neither, in pixels.

    Pictures are made as large as the first input image, within the limits. Videos keep the number
    of pixels that is usual for the model and take the image's shape.
    """
    abilities = model.abilities
    usual = abilities.default_width, abilities.default_height
    if not given.get("image") or "width" in given or "height" in given:
        return usual
    source = input_size(given["image"][0])
    most = max_pixels(model, settings)
    scale = 1.0
    if task in VIDEO_TASKS:
        scale = math.sqrt(usual[0] * usual[1] / (source[0] * source[1]))
    return _fitted(source, scale, abilities.size_multiple, most)


def _fitted(source: tuple[int, int], scale: float, multiple: int, most: int) -> tuple[int, int]:
    """Return the size nearest to `source` times `scale` that has at most `most` pixels."""
    scale = min(scale, math.sqrt(most / (source[0] * source[1])))
    width, height = (max(multiple, round(side * scale / multiple) * multiple) for side in source)
    if width > height:
        width = min(width, most // height // multiple * multiple)
    else:
        height = min(height, most // width // multiple * multiple)
    return max(multiple, width), max(multiple, height)


def input_errors(values: Mapping[str, Any], model: ServedModel) -> Iterator[FieldError]:
    """Yield one error for each input that the task does not take, lacks, or that does not fit."""
    task, images, mask = values["task"], values.get("image") or (), values.get("mask_image")
    if images and task not in FROM_IMAGE_TASKS:
        yield FieldError("image", _takes_none(task, model))
    elif not images and task in FROM_IMAGE_TASKS:
        yield FieldError("image", f"is missing; {task} needs one", "missing")
    most = 1 if task == INPAINT else max(1, model.abilities.max_images)
    if len(images) > most:
        yield FieldError("image", f"has {len(images)} pictures; {most} is the most for {task}")
    if mask and task != INPAINT:
        yield FieldError("mask_image", _takes_none(task, model))
    elif not mask and task == INPAINT:
        yield FieldError("mask_image", f"is missing; {INPAINT} needs one", "missing")
    if mask and images and input_size(mask) != input_size(images[0]):
        sizes = " and the image ".join(
            "{} x {}".format(*input_size(name)) for name in (mask, images[0])
        )
        yield FieldError("mask_image", f"is {sizes}; make them equal")


def _takes_none(task: str, model: ServedModel) -> str:
    tasks = ", ".join(model.abilities.tasks)
    return f"{task} takes none; the tasks of {model.name!r} are {tasks}"
