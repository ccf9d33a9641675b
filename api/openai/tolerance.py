"""The one rule of OpenAI-style calls: what cannot do harm is accepted and named in `warnings`.

`KNOWN` are the fields of OpenAI, vLLM-Omni and diffusers that no request has. `tolerate` leaves out
parameters that the model does not read and rounds sizes and frames. Native calls have none of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from marshmallow import fields

from api.http.fields import described
from api.models.catalog import ServedModel
from api.requests.checks import max_pixels, most_of, shown
from configs.parameters import IMAGE_TO_VIDEO, PARAMETERS, Abilities
from configs.scheduler_fields import SHIFTS
from configs.settings import Settings

# Without their pictures a request would be another one.
_NEVER_LEFT_OUT: Final = frozenset({"image", "mask_image"})


class IgnoredField(fields.Raw):
    """A field without a meaning here; the answer's `warnings` name it."""

    def __init__(self) -> None:
        """Take any value."""
        super().__init__(metadata=described("Accepted and ignored; the answer's warnings say so."))

    def sentence(self, name: str, value: Any, abilities: Abilities) -> str:
        """Return what the client is told; nothing where the value is what happens anyway."""
        return f"{name} has no meaning here and was ignored"


class FixedField(IgnoredField):
    """A field that says what the model fixes; another value is not used, which is said."""

    def __init__(self, own: tuple[str, ...] = ()) -> None:
        """Take the scheduler settings that may have the model's own value."""
        super().__init__()
        self._own = own

    def sentence(self, name: str, value: Any, abilities: Abilities) -> str:
        """Return that the value is not used, and the model's own where it is known."""
        if value is False or value in ({}, [], ""):
            return ""
        settings = abilities.scheduler_settings
        own = next((settings[each].get("value") for each in self._own if each in settings), None)
        if own is None:
            return f"{name} was not used: a request cannot set it, the model's own value stands"
        if str(value) == str(own) or _number(value) == own:
            return ""
        return f"{name} was not used: the model's own value {own} stands"


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


KNOWN: Final[Mapping[str, fields.Field[Any]]] = {
    **{
        name: IgnoredField()
        for name in (
            "safety_identifier",
            "quality",
            "style",
            "moderation",
            "input_fidelity",
            "generator_device",
            "vae_use_slicing",
            "vae_use_tiling",
            "return_stage_metrics",
        )
    },
    "boundary_ratio": FixedField(),
    "flow_shift": FixedField(SHIFTS),
    "extra_params": FixedField(),
    "extra_args": FixedField(),
    "bot_task": IgnoredField(),
    "sys_type": IgnoredField(),
    "system_prompt": IgnoredField(),
}


def tolerate(given: dict[str, Any], model: ServedModel, settings: Settings) -> list[str]:
    """Leave out what the model does not read and round what it must; return what was done.

    `given` names its task, which the model has, and is changed in place. Values that are out of
    range stay as they are, for the checks to refuse.
    """
    return [
        *_left_out(given, model),
        *_rounded_sides(given, model, settings),
        *_rounded_frames(given, model, settings),
    ]


def _left_out(given: dict[str, Any], model: ServedModel) -> Iterator[str]:
    for name in [name for name in given if name in PARAMETERS and name not in _NEVER_LEFT_OUT]:
        parameter = PARAMETERS[name]
        if model.abilities.supports(parameter, given["task"]):
            continue
        value = given.pop(name)
        if value not in (*parameter.off, False, "", None):
            yield f"{name} was ignored: {given['task']} of {model.name!r} does not read it"


def _rounded_sides(given: dict[str, Any], model: ServedModel, settings: Settings) -> Iterator[str]:
    multiple, most = model.abilities.size_multiple, max_pixels(model, settings)
    abilities = model.abilities
    asked = {name: given[name] for name in ("width", "height") if name in given}
    if not any(side % multiple for side in asked.values()):
        return
    width = asked.get("width", abilities.default_width)
    height = asked.get("height", abilities.default_height)
    if width < 1 or height < 1 or width * height > most:
        return  # which is an error of its own
    sides = {name: _nearest(side, multiple) for name, side in asked.items()}
    if math.prod({"width": width, "height": height, **sides}.values()) > most:
        sides = {name: max(multiple, side // multiple * multiple) for name, side in asked.items()}
    for name, side in sides.items():
        if side != asked[name]:
            given[name] = side
            yield f"{name} {shown(asked[name])} was rounded to {side}, a multiple of {multiple}"


def _nearest(side: int, multiple: int) -> int:
    return max(multiple, (side + multiple // 2) // multiple * multiple)


def _rounded_frames(given: dict[str, Any], model: ServedModel, settings: Settings) -> Iterator[str]:
    frames, step = given.get("num_frames"), model.abilities.frames_step
    if frames is None or not (frames - 1) % step:
        return
    most = most_of(PARAMETERS["num_frames"], model.abilities, settings) or 1
    if not 1 <= frames <= most:
        return  # which is an error of its own
    # Half of a step goes down, as diffusers' Wan does.
    least = 1 if given["task"] == IMAGE_TO_VIDEO else 0
    steps = max(least, math.ceil((frames - 1) / step - 0.5))
    if 1 + steps * step > most:
        steps -= 1
    given["num_frames"] = 1 + steps * step
    yield (
        f"num_frames {frames} was rounded to {given['num_frames']}, 1 and a multiple of {step} more"
    )
