"""The checks of a request against the model and the settings, and the defaults."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.models.catalog import ServedModel
from api.requests.inputs import input_size
from api.webhooks.post import address_fault
from configs.errors import FieldError, NotEditable, NotEditableWhileRunning
from configs.parameters import (
    FROM_IMAGE_TASKS,
    IMAGE_FORMATS,
    IMAGE_TASKS,
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINT,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
    VIDEO_FORMATS,
    VIDEO_TASKS,
    Abilities,
    Parameters,
)
from configs.settings import Settings
from routing.request import Request, Status, Webhook


def max_pixels(model: ServedModel, settings: Settings) -> int:
    """Return the largest width x height that an output of the model may have."""
    return min(model.abilities.max_pixels, settings.max_pixels)


def max_frames(model: ServedModel, settings: Settings) -> int:
    """Return the most frames that a video of the model may have."""
    return min(model.abilities.max_frames or settings.max_frames, settings.max_frames)


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
    if not abilities.supports_strength(task):
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


MAX_SEED: Final = 2**63 - 1


_DRAWN_SEEDS: Final = 2**32


_MAX_GUIDANCE: Final = 100.0


_MAX_QUALITY: Final = 100


_COMPRESSED: Final = ("jpeg", "webp")


_MOST_DIGITS: Final = 20


def complete(given: Mapping[str, Any], model: ServedModel, settings: Settings) -> dict[str, Any]:
    """Return all parameters by name: what was given, and the model's defaults for the rest.

    A seed that is neither given nor set by the stage file is drawn here, below 2^32.
    """
    abilities = model.abilities
    task = given.get("task") or picked_task(given, abilities)
    width, height = default_size(given, task, model, settings)
    defaults = {
        **task_defaults(task, abilities),
        "task": task,
        "width": width,
        "height": height,
        "num_inference_steps": abilities.default_steps,
        "guidance_scale": abilities.default_guidance_scale,
    }
    if abilities.default_true_cfg_scale is not None:
        defaults["true_cfg_scale"] = abilities.default_true_cfg_scale
    if abilities.default_negative_prompt is not None:
        defaults["negative_prompt"] = abilities.default_negative_prompt
    usable = set(Parameters.__dataclass_fields__) - _untaken(abilities) - untaken(task, abilities)
    staged = {name: value for name, value in model.defaults.items() if name in usable}
    if staged.get("output_format") in formats_of(task):
        defaults.pop("output_format")
    full_run = abilities.full_run_schedulers
    if abilities.supports_strength(task) and staged.get("scheduler") in full_run:
        staged.pop("scheduler")
    values = {**staged, **defaults, **given}
    values.setdefault("seed", secrets.randbelow(_DRAWN_SEEDS))
    if values["output_format"] not in _COMPRESSED and "output_compression" not in given:
        values.pop("output_compression", None)
    return values


@dataclass(frozen=True, slots=True)
class ParameterChecks:
    """Checks completed parameters; `skip` names fields already known to be wrong."""

    values: Mapping[str, Any]
    model: ServedModel
    settings: Settings
    skip: frozenset[str] = frozenset()

    def errors(self) -> list[FieldError]:
        """Return one error for each wrong field."""
        found = (
            *self._texts(),
            *self._choices(),
            *self._adapters(),
            *input_errors(self.values, self.model),
            *task_errors(self.values, self.model, self.settings),
            *self._size(),
            *self._numbers(),
            *self._seed(),
            *self._refused(),
        )
        return [error for error in found if error.param not in self.skip]

    def _texts(self) -> Iterator[FieldError]:
        most = self.settings.max_prompt_chars
        prompt = self.values.get("prompt")
        if prompt is None:
            yield FieldError("prompt", "is missing", "missing")
        elif not prompt.strip():
            yield FieldError("prompt", "is empty; say what the output should show")
        for name in ("prompt", "negative_prompt"):
            text = self.values.get(name) or ""
            if len(text) > most:
                yield FieldError(name, f"has {len(text)} characters; {most} is the most")
            if "\0" in text:
                yield FieldError(name, "holds a zero character; take it out")

    def _choices(self) -> Iterator[FieldError]:
        abilities, task = self.model.abilities, self.values["task"]
        if task not in abilities.tasks:
            yield self._unknown("task", abilities.tasks)
        name = self.values.get("scheduler")
        if name is not None and name not in abilities.schedulers:
            yield self._unknown("scheduler", abilities.schedulers)
        elif name is not None and name not in abilities.schedulers_for(task):
            words = ", ".join(abilities.schedulers_for(task))
            yield FieldError(
                "scheduler",
                f"{name} begins at the first step, and {task} of {self.model.name!r} later; "
                f"give one of {words}",
            )
        quality = self.values.get("output_compression")
        if quality is None:
            return
        if not 0 <= quality <= _MAX_QUALITY:
            yield FieldError("output_compression", f"{quality} is not from 0 to {_MAX_QUALITY}")
        elif self.values["output_format"] not in _COMPRESSED:
            yield FieldError("output_compression", f"is for {' and '.join(_COMPRESSED)}")

    def _unknown(self, name: str, known: Sequence[str]) -> FieldError:
        value, words = self.values[name], ", ".join(known) or "none"
        return FieldError(
            name, f"{value[:80]!r} is not served by {self.model.name!r}; known are {words}"
        )

    def _adapters(self) -> Iterator[FieldError]:
        known = self.model.abilities.loras
        unknown = [
            each["name"] for each in self.values.get("lora") or () if each["name"] not in known
        ]
        if unknown:
            words = ", ".join(known) or "none"
            yield FieldError(
                "lora",
                f"{unknown[0][:80]!r} is no adapter of {self.model.name!r}; known are {words}",
            )

    def _size(self) -> Iterator[FieldError]:
        multiple = self.model.abilities.size_multiple
        width, height = self.values["width"], self.values["height"]
        right = True
        for name, pixels in (("width", width), ("height", height)):
            if pixels < 1 or pixels % multiple:
                right = False
                yield FieldError(name, _off_multiple(pixels, multiple))
        most = max_pixels(self.model, self.settings)
        if right and width * height > most:
            yield FieldError(
                "width", f"{width} x {height} is {width * height} pixels; {most} is the most"
            )

    def _numbers(self) -> Iterator[FieldError]:
        bounds = (
            ("num_inference_steps", 1, self.settings.max_steps),
            ("num_outputs_per_prompt", 1, self.settings.max_outputs),
            ("guidance_scale", 0, _MAX_GUIDANCE),
            ("true_cfg_scale", 0, _MAX_GUIDANCE),
        )
        for name, low, high in bounds:
            value = self.values.get(name)
            if value is not None and not low <= value <= high:
                yield FieldError(name, f"{shown(value)} is not from {low} to {high:g}")

    def _seed(self) -> Iterator[FieldError]:
        last = MAX_SEED - (self.values.get("num_outputs_per_prompt") or 1) + 1
        if not 0 <= self.values["seed"] <= last:
            yield FieldError("seed", f"{shown(self.values['seed'])} is not from 0 to {last}")

    def _refused(self) -> Iterator[FieldError]:
        """What the pipeline would silently leave aside is refused instead."""
        if self.values.get("preview") and not self.model.abilities.preview:
            yield FieldError("preview", f"{self.model.name!r} can show none; leave it out")
        for name in sorted(_untaken(self.model.abilities)):
            if self.values.get(name) is not None:
                yield FieldError(name, f"{self.model.name!r} takes none; leave it out")


def shown(value: int | float) -> str:
    """Return a number as a message may show it, however many digits it has."""
    text = format(value, ".6g") if type(value) is float else str(value)
    return text if len(text) <= _MOST_DIGITS else f"{text[:_MOST_DIGITS]}..."


def _untaken(abilities: Abilities) -> set[str]:
    taken = {
        "negative_prompt": abilities.negative_prompt,
        "guidance_scale": abilities.guidance_scale,
        "true_cfg_scale": abilities.true_cfg_scale,
    }
    return {name for name, takes in taken.items() if not takes}


def _off_multiple(pixels: int, multiple: int) -> str:
    below = max(multiple, pixels // multiple * multiple)
    fix = f"{below} or {below + multiple}" if pixels > multiple else str(multiple)
    return f"{shown(pixels)} is not a multiple of {multiple}; give {fix}"


_MAX_SECONDS: Final = 31_536_000.0


_MAX_URL: Final = 2000


def seconds_faults(given: Mapping[str, Any]) -> list[FieldError]:
    """Return what is wrong with `expires_in` and `timeout`."""
    return [
        FieldError(
            name, f"{shown(given[name])} is not above 0 and at most {_MAX_SECONDS:.0f} seconds"
        )
        for name in ("expires_in", "timeout")
        if name in given and not 0 < given[name] <= _MAX_SECONDS
    ]


def webhook_of(given: Mapping[str, Any] | None) -> Webhook | None:
    """Return the webhook that a body names; of the end alone where it names no events."""
    return Webhook(given["url"], tuple(given.get("events", ["ended"]))) if given else None


def webhook_faults(given: Mapping[str, Any], settings: Settings) -> list[FieldError]:
    """Return what is wrong with a webhook of the right shape."""
    url = (given.get("webhook") or {}).get("url")
    if url is None:
        return []
    if not settings.webhook_secret:
        return [FieldError("webhook", "is not served here: WEBHOOK_SECRET is not set")]
    if len(url) > _MAX_URL:
        return [FieldError("webhook.url", f"has {len(url)} characters; {_MAX_URL} is the most")]
    fault = address_fault(url, allow_private=settings.webhook_allow_private)
    return [FieldError("webhook.url", fault)] if fault else []


_NEVER_CHANGED: Final = frozenset({"affinity_key", "metadata", "model", "webhook"})


_CHANGED_WHILE_RUNNING: Final = frozenset(
    {"guidance_scale", "preview", "timeout", "true_cfg_scale"}
)


def refuse_by_state(body: Mapping[str, Any], request: Request) -> None:
    """Refuse a change that comes too late, or that none is allowed of.

    Raises:
        NotEditable: The request has ended, or a field never changes.
        NotEditableWhileRunning: The engine cannot change a field between two steps.
    """
    if request.is_terminal:
        raise NotEditable(
            f"Request {request.id} is {request.status}; what has ended stays as it is."
        )
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
