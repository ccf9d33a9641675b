"""The defaults of a request, and its checks against the model and the settings.

What the table of parameters says of one holds for all alike; below it is what is peculiar to some.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from api.models.catalog import ServedModel
from api.requests.inputs import input_size
from api.requests.schema import editable_in
from api.webhooks.post import address_fault
from configs.errors import FieldError, NotEditable, NotEditableWhileRunning
from configs.fields import Editable, Parameter, choices
from configs.parameters import (
    FROM_IMAGE_TASKS,
    IMAGE_FORMATS,
    IMAGE_TASKS,
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINT,
    MAX_SEED,
    PARAMETERS,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
    VIDEO_FORMATS,
    VIDEO_TASKS,
    Abilities,
)
from configs.settings import Settings
from routing.request import Request, Status

_DRAWN_SEEDS: Final = 2**32
_COMPRESSED: Final = ("jpeg", "webp")
_MOST_DIGITS: Final = 20
_MAX_URL: Final = 2000
_NEVER_CHANGED: Final = editable_in(Editable.NEVER)
_CHANGED_WHILE_RUNNING: Final = editable_in(Editable.RUNNING)


def most_of(parameter: Parameter, abilities: Abilities, settings: Settings) -> float | None:
    """Return the most that a parameter may be with this model; None for what is not bounded."""
    most = getattr(settings, parameter.limit) if parameter.limit else parameter.high
    own = abilities.most(parameter)
    return most if own is None else own if most is None else min(most, own)


def max_pixels(model: ServedModel, settings: Settings) -> int:
    """Return the largest width x height that an output of the model may have."""
    return min(model.abilities.max_pixels, settings.max_pixels)


def formats_of(task: str) -> tuple[str, ...]:
    """Return the file formats of a task's outputs, its usual one first."""
    return VIDEO_FORMATS if task in VIDEO_TASKS else IMAGE_FORMATS


def all_formats(abilities: Abilities) -> list[str]:
    """Return the file formats of all tasks of a model."""
    kinds = ((IMAGE_TASKS, IMAGE_FORMATS), (VIDEO_TASKS, VIDEO_FORMATS))
    return [form for tasks, forms in kinds if tasks & set(abilities.tasks) for form in forms]


def picked_task(given: Mapping[str, Any], abilities: Abilities) -> str:
    """Return the task that the inputs ask for, among those the model has."""
    if given.get("mask_image"):
        fitting: tuple[str, ...] = (INPAINT,)
    elif given.get("image"):
        fitting = (IMAGE_TO_IMAGE, IMAGE_TO_VIDEO)
    else:
        fitting = (TEXT_TO_IMAGE, TEXT_TO_VIDEO)
    for task in fitting:
        if task in abilities.tasks:
            return task
    return abilities.tasks[0]


def complete(given: Mapping[str, Any], model: ServedModel, settings: Settings) -> dict[str, Any]:
    """Return all parameters by name: what was given, and the model's defaults for the rest.

    A seed that is neither given nor set by the stage file is drawn here, below 2^32.
    """
    task = given.get("task") or picked_task(given, model.abilities)
    values = {**_defaults(task, model), **given, "task": task}
    if "seed" not in values:
        values["seed"] = secrets.randbelow(_DRAWN_SEEDS)
    if given.get("image") and "width" not in given and "height" not in given:
        values["width"], values["height"] = _size_of_image(given, model, settings)
    if values.get("strength") and "strength" not in given:
        # A default is not to leave a request without a step.
        least = min(1.0, math.nextafter(1 / max(1, values["num_inference_steps"]), 2))
        values["strength"] = max(values["strength"], least)
    # 100 is the best quality, which the others have anyway; OpenAI's clients send it with png.
    if values["output_format"] not in _COMPRESSED and given.get("output_compression", 100) == 100:
        values.pop("output_compression", None)
    return values


def _defaults(task: str, model: ServedModel) -> dict[str, Any]:
    """Return what requests of a task have that say nothing: the model's, else the stage file's."""
    abilities, staged = model.abilities, dict(model.defaults)
    formats = formats_of(task)
    if staged.get("output_format") not in formats:
        staged["output_format"] = formats[0]
    full_run = abilities.full_run_schedulers
    if staged.get("scheduler") in full_run and abilities.supports_strength(task):
        del staged["scheduler"]
    values = {}
    for name, parameter in PARAMETERS.items():
        if not abilities.supports(parameter, task):
            continue
        if parameter.default and task in (parameter.default_tasks or (task,)):
            own = getattr(abilities, parameter.default)
            value = staged.get(name) if own is None else own
            if value is not None or parameter.nullable:
                values[name] = value
        elif name in staged:
            values[name] = staged[name]
    return values


def _size_of_image(
    given: Mapping[str, Any], model: ServedModel, settings: Settings
) -> tuple[int, int]:
    """Return width and height in pixels for a request with an image that names neither.

    The output has about as many pixels as is usual for the model, within the limits, in the shape
    of the first input image.
    """
    abilities = model.abilities
    source, most = input_size(given["image"][0]), max_pixels(model, settings)
    usual = min(abilities.default_width * abilities.default_height, most)
    scale = math.sqrt(usual / (source[0] * source[1]))
    multiple = abilities.size_multiple
    # A strip that would be thinner than the multiple becomes that thick, and shorter.
    scale *= min(1.0, min(source) * scale / multiple)
    width, height = (max(multiple, round(side * scale / multiple) * multiple) for side in source)
    if width > height:
        width = min(width, most // height // multiple * multiple)
    else:
        height = min(height, most // width // multiple * multiple)
    return max(multiple, width), max(multiple, height)


def parameter_errors(
    values: Mapping[str, Any], model: ServedModel, settings: Settings
) -> list[FieldError]:
    """Return one error for each wrong one of complete parameters."""
    task, known = values["task"], values["task"] in model.abilities.tasks
    found = list[FieldError]()
    for name, value in values.items():
        # A value that asks for nothing is right with any model.
        if value is None or value is False or value == ():
            continue
        parameter = PARAMETERS[name]
        most = most_of(parameter, model.abilities, settings)
        if known and not model.abilities.supports(parameter, task):
            if value not in parameter.off:
                found.append(_unsupported(parameter, task, model))
        elif most is None:
            continue
        elif parameter.type is str:
            found += _text_errors(name, value, int(most))
        elif not (parameter.low or 0) <= value <= most:
            low = parameter.low or 0
            found.append(FieldError(name, f"{shown(value)} is not from {low} to {most:.19g}"))
    found += _size_errors(values, model, settings)
    found += _peculiar_errors(values, model, settings, known=known)
    return found


def _unsupported(parameter: Parameter, task: str, model: ServedModel) -> FieldError:
    if parameter.tasks is None:
        return FieldError(parameter.name, f"is not supported by {model.name!r}; leave it out")
    fix = "leave it out"
    if parameter.name in {"image", "mask_image"}:
        fix = f"its tasks are {', '.join(model.abilities.tasks)}"
    reason = f"is not supported by {task} of {model.name!r}; {fix}"
    return FieldError(parameter.name, reason)


def _text_errors(name: str, text: str, most: int) -> list[FieldError]:
    found = []
    if name == "prompt" and not text.strip():
        found.append(FieldError(name, "is empty; say what the output should show"))
    if len(text) > most:
        found.append(FieldError(name, f"has {len(text)} characters; use {most} at most"))
    if "\0" in text:
        found.append(FieldError(name, "contains a zero character; remove it"))
    return found


def _size_errors(
    values: Mapping[str, Any], model: ServedModel, settings: Settings
) -> list[FieldError]:
    multiple, most = model.abilities.size_multiple, max_pixels(model, settings)
    width, height = values["width"], values["height"]
    found = list[FieldError]()
    for name in ("width", "height"):
        if values[name] < 1 or values[name] % multiple:
            found.append(FieldError(name, _off_multiple(values[name], multiple)))
    if not found and width * height > most:
        reason = f"{width} x {height} is {width * height} pixels; use {most} at most"
        found.append(FieldError("width", reason))
    return found


def _peculiar_errors(
    values: Mapping[str, Any], model: ServedModel, settings: Settings, *, known: bool
) -> Iterator[FieldError]:
    """Yield what the table of parameters cannot say; none of it costs a request without it."""
    if "prompt" not in values:
        yield FieldError("prompt", "is missing", "missing")
    if values.get("num_outputs_per_prompt", 1) > 1:
        yield from _seed_errors(values)
    if values.get("scheduler") is not None:
        yield from _scheduler_errors(values["scheduler"], values["task"], model)
    if model.abilities.scheduler_steps:
        yield from _scheduler_steps_errors(values, model.abilities)
    if values.get("lora"):
        yield from _lora_errors(values["lora"], model)
    if values.get("output_compression") is not None and values["output_format"] not in _COMPRESSED:
        reason = f"is only for {choices(_COMPRESSED)}; leave it out"
        yield FieldError("output_compression", reason)
    if known:
        yield from _task_errors(values, model, settings)
    else:
        yield _unknown("task", values["task"], model.abilities.tasks, model)


def _task_errors(
    values: Mapping[str, Any], model: ServedModel, settings: Settings
) -> Iterator[FieldError]:
    task, form = values["task"], values["output_format"]
    if form not in formats_of(task):
        reason = f"{form} is not available for {task}; use {choices(formats_of(task))}"
        yield FieldError("output_format", reason)
    if values.get("image") or values.get("mask_image") or task in FROM_IMAGE_TASKS:
        yield from _input_errors(values, model)
    if values.get("strength") is not None:
        yield from _strength_errors(values)
    if values.get("padding_mask_crop") is not None and values.get("num_outputs_per_prompt", 1) > 1:
        yield FieldError("padding_mask_crop", "is for one output; set num_outputs_per_prompt to 1")
    if task in VIDEO_TASKS:
        yield from _video_errors(values, model, settings)


def _seed_errors(values: Mapping[str, Any]) -> Iterator[FieldError]:
    last = MAX_SEED - values["num_outputs_per_prompt"] + 1
    if last < values["seed"] <= MAX_SEED:
        yield FieldError("seed", f"{shown(values['seed'])} is not from 0 to {last}")


def _unknown(name: str, value: str, known: tuple[str, ...], model: ServedModel) -> FieldError:
    words = f"use {choices(known)}" if known else "leave it out"
    return FieldError(name, f"{value[:80]!r} is not available with {model.name!r}; {words}")


def _scheduler_errors(name: str, task: str, model: ServedModel) -> Iterator[FieldError]:
    abilities = model.abilities
    if name not in abilities.schedulers:
        yield _unknown("scheduler", name, abilities.schedulers, model)
    elif name not in abilities.schedulers_for(task):
        yield FieldError(
            "scheduler",
            f"{name} must run from the first step and {task} of {model.name!r} starts later; "
            f"use {choices(abilities.schedulers_for(task))}",
        )


def _scheduler_steps_errors(
    values: Mapping[str, Any], abilities: Abilities
) -> Iterator[FieldError]:
    name = values.get("scheduler") or abilities.schedulers[0]
    most, steps = abilities.scheduler_steps.get(name), values["num_inference_steps"]
    if most is not None and steps > most:
        reason = f"{shown(steps)} is more than the {most} steps that {name} has; use fewer"
        yield FieldError("num_inference_steps", reason)


def _lora_errors(loras: Iterable[Mapping[str, Any]], model: ServedModel) -> Iterator[FieldError]:
    known = model.abilities.loras
    for lora in loras:
        if lora["name"] not in known:
            yield _unknown("lora", lora["name"], known, model)
            return


def _input_errors(values: Mapping[str, Any], model: ServedModel) -> Iterator[FieldError]:
    """Yield one error for each input that the task lacks, or that does not fit."""
    task, images, mask = values["task"], values.get("image") or (), values.get("mask_image")
    if not images and task in FROM_IMAGE_TASKS:
        yield FieldError("image", f"is missing; {task} needs one", "missing")
    yield from count_errors(values, model)
    if not mask and task == INPAINT:
        yield FieldError("mask_image", f"is missing; {INPAINT} needs one", "missing")
    if mask and images and input_size(mask) != input_size(images[0]):
        sizes = " and the image ".join(
            "{} x {}".format(*input_size(name)) for name in (mask, images[0])
        )
        yield FieldError("mask_image", f"is {sizes}; make them equal")


def count_errors(values: Mapping[str, Any], model: ServedModel) -> Iterator[FieldError]:
    """Yield an error for more pictures than the task has; they need not be decoded for that."""
    images = values.get("image") or ()
    task = values.get("task") or picked_task(values, model.abilities)
    most = 1 if task == INPAINT else max(1, model.abilities.max_images)
    if len(images) > most:
        yield FieldError("image", f"has {len(images)} pictures; use {most} at most for {task}")


def _strength_errors(values: Mapping[str, Any]) -> Iterator[FieldError]:
    strength, steps = values["strength"], values["num_inference_steps"]
    if 0 <= strength <= 1 and steps >= 1 and int(strength * steps) < 1:
        yield FieldError(
            "strength",
            f"{strength:.6g} of {steps} steps is less than one step; give {1 / steps:.3g} or more,"
            " or more steps",
        )


def _video_errors(
    values: Mapping[str, Any], model: ServedModel, settings: Settings
) -> Iterator[FieldError]:
    frames, step = values["num_frames"], model.abilities.frames_step
    most = most_of(PARAMETERS["num_frames"], model.abilities, settings) or 1
    if not 1 <= frames <= most:
        return  # which is an error of its own
    if (frames - 1) % step:
        below = frames - (frames - 1) % step
        reason = f"{frames} is not 1 and a multiple of {step} more; use {below} or {below + step}"
        yield FieldError("num_frames", reason)
    elif frames == 1 and values["task"] == IMAGE_TO_VIDEO:
        reason = f"1 frame would be the image that was given; use {1 + step} or more"
        yield FieldError("num_frames", reason)
    elif frames * max(values["width"], 0) * max(values["height"], 0) > settings.max_video_pixels:
        yield FieldError(
            "num_frames",
            f"{frames} frames of {shown(values['width'])} x {shown(values['height'])} are more "
            f"than {settings.max_video_pixels} pixels; use fewer or smaller ones",
        )


def shown(value: int | float) -> str:
    """Return a number as a message may show it, however many digits it has."""
    text = format(value, ".6g") if type(value) is float else str(value)
    return text if len(text) <= _MOST_DIGITS else f"{text[:_MOST_DIGITS]}..."


def _off_multiple(pixels: int, multiple: int) -> str:
    below = max(multiple, pixels // multiple * multiple)
    fix = f"{below} or {below + multiple}" if pixels > multiple else str(multiple)
    return f"{shown(pixels)} is not a multiple of {multiple}; use {fix}"


def webhook_errors(webhook: Mapping[str, Any], settings: Settings) -> list[FieldError]:
    """Return what is wrong with a webhook of the right shape."""
    url = webhook.get("url")
    if url is None:
        return []
    if not settings.webhook_secret:
        return [FieldError("webhook", "is not available: WEBHOOK_SECRET is not set")]
    if len(url) > _MAX_URL:
        reason = f"has {len(url)} characters; use {_MAX_URL} at most"
        return [FieldError("webhook.url", reason)]
    fault = address_fault(url, allow_private=settings.webhook_allow_private)
    return [FieldError("webhook.url", fault)] if fault else []


def refuse_by_state(body: Mapping[str, Any], request: Request) -> None:
    """Refuse a change that comes too late, or that none is allowed of.

    Raises:
        NotEditable: The request has ended, or a field never changes.
        NotEditableWhileRunning: The engine cannot change a field between two steps.
    """
    if request.is_terminal:
        raise NotEditable(f"Request {request.id} is {request.status} and cannot change any more.")
    fixed = sorted(_NEVER_CHANGED.intersection(body))
    if fixed:
        raise NotEditable(
            f"{', '.join(fixed)} of a request never changes; send a new one.", param=fixed[0]
        )
    late = sorted(set(body) - _CHANGED_WHILE_RUNNING)
    if request.status is Status.RUNNING and late:
        raise NotEditableWhileRunning(
            f"{', '.join(late)} cannot be changed while the request runs; "
            f"{' and '.join(sorted(_CHANGED_WHILE_RUNNING))} can.",
            param=late[0],
        )
