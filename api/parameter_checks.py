"""The checks of generation parameters against the model and the settings, and the defaults.

Takes what a client gave, fills in what it left out, and names every wrong field at once. Does not
know the body they came in, nor HTTP.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.catalog import ServedModel
from api.input_checks import default_size, input_errors, picked_task
from api.model_limits import max_pixels
from api.task_checks import formats_of, task_defaults, task_errors, untaken
from configs.errors import FieldError
from configs.settings import Settings
from routing.parameters import Abilities, Parameters

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
    usable = set(Parameters.__dataclass_fields__) - _untaken(abilities) - untaken(task, abilities)
    staged = {name: value for name, value in model.defaults.items() if name in usable}
    if staged.get("output_format") in formats_of(task):
        defaults.pop("output_format")
    if abilities.takes_strength(task) and staged.get("scheduler") in abilities.full_run_schedulers:
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
    mend = f"{below} or {below + multiple}" if pixels > multiple else str(multiple)
    return f"{shown(pixels)} is not a multiple of {multiple}; give {mend}"
