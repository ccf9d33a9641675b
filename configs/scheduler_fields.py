"""What a stage file says of the noise scheduler of its model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from marshmallow import ValidationError, fields

from configs.fields import Number, OneOf, Text

SHIFTS: Final = ("shift", "flow_shift")
_FIX: Final = "name a class such as LCMScheduler, or write `option: value` lines beneath it"
_SIGMAS_FIX: Final = "list one number above 0 for each step, each below the one before"


@dataclass(frozen=True)
class SchedulerSettings:
    """The noise scheduler of a stage.

    Attributes:
        class_name: Class of diffusers in place of the model's own; None for the own.
        options: Entries of its configuration, by diffusers' names, over those that are saved; and
            `eta`, for classes whose steps have one.
        sigmas: Of each step, from the first; none for the scheduler's own.
    """

    class_name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sigmas: tuple[float, ...] = ()


# Those that people write; the worker knows which others a class has.
_CHECKED: Final[Mapping[str, fields.Field[Any]]] = {
    "class": Text("LCMScheduler"),
    "timestep_spacing": OneOf("leading", "linspace", "trailing"),
    "eta": Number(0, 1, "share of new noise in a step"),
    **{name: Number(0.01, 100, "shift of the noise") for name in SHIFTS},
}


class Scheduler(fields.Field[SchedulerSettings]):
    """A class by its name, or a mapping with `class`, `sigmas` and options of the class."""

    def _deserialize(self, value: Any, attr: str | None, data: Any, **_: Any) -> SchedulerSettings:
        if isinstance(value, str) and value.strip():
            return SchedulerSettings(value.strip())
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValidationError(f"is not a mapping; {_FIX}")
        faults, options = dict[str, list[str]](), dict[str, Any]()
        for name, entry in value.items():
            try:
                options[name] = _CHECKED[name].deserialize(entry) if name in _CHECKED else entry
                if name == "sigmas":
                    _refuse_odd_sigmas(entry)
            except ValidationError as error:
                faults[name] = [str(reason) for reason in error.messages]
        if options.keys() >= set(SHIFTS):
            faults["flow_shift"] = ["says the same as shift; keep one of the two"]
        if faults:
            raise ValidationError(dict(faults))
        class_name, sigmas = options.pop("class", None), options.pop("sigmas", ())
        return SchedulerSettings(class_name, options, tuple(map(float, sigmas)))


def _refuse_odd_sigmas(sigmas: Any) -> None:
    numbers = isinstance(sigmas, list) and all(type(each) in (int, float) for each in sigmas)
    if not numbers or not sigmas or not sigmas[-1] > 0:
        raise ValidationError(f"is not a list of sigmas; {_SIGMAS_FIX}")
    if not all(one > next_one for one, next_one in pairwise(sigmas)):
        raise ValidationError(f"does not fall; {_SIGMAS_FIX}")
