"""Guidance that requests may change between two steps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch

from workers.engine.arguments import arguments_of, default_of
from workers.engine.run import Feature, Parts, Run, Slot
from workers.families import manners_of

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


_ARITHMETIC = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__neg__", "__abs__", "__float__"),
)


class RunningScale(float):
    """A float of the value it began with, whose arithmetic reads the value of now.

    What reads it in C without torch's dispatch (`torch.full`, `torch.tensor`) gets the first one.

    Attributes:
        first: The value it began with.
        values: That of now, for each sample that the pipeline was called for.
        common: That of all samples; None where they have values of their own.
        samples: Shape of all samples, one row for each; None while it is not known.
        used: Whether it was read as it is now, since this was last set back.
        divided: Whether samples have values of their own and it was read in a way that has none;
            then it was read as `first`.
    """

    first: float
    values: list[float]
    common: float | None
    samples: torch.Size | None
    used: bool
    divided: bool
    _answers: dict[tuple[str, Any], bool]

    def __new__(cls, value: float, samples: int = 1) -> Self:
        """Begin with `value` for so many samples."""
        scale = super().__new__(cls, value)
        scale.first = float.__float__(scale)
        scale.values = [scale.first] * samples
        scale.common = scale.first
        scale.samples = None
        scale.used = scale.divided = False
        scale._answers = {}
        return scale

    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        return self != 0.0

    def set(self, rows: slice, value: float) -> None:
        """Give some of the samples another value."""
        self.values[rows] = [value] * len(self.values[rows])
        self.common = self.values[0] if len(set(self.values)) == 1 else None

    def can_become(self, value: float) -> bool:
        """Tell whether all comparisons made so far would come out the same with `value`."""
        return all(
            getattr(float, name)(value, other) is answer
            for (name, other), answer in self._answers.items()
        )

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of torch that this is an argument of."""
        # Each step of each run comes by here.
        plain, named, known, alike = list(args), dict(kwargs or {}), False, True
        for index, each in enumerate(plain):
            if isinstance(each, cls):
                each.used = known = True
                alike = alike and each.common is not None
                plain[index] = each.common
        for name, each in named.items():
            if isinstance(each, cls):
                each.used = known = True
                alike = alike and each.common is not None
                named[name] = each.common
        if not known:
            return NotImplemented
        return function(*plain, **named) if alike else _by_rows(function, args, kwargs or {})

    def has_row_for_each(self, made: Any) -> bool:
        """Tell whether a result of torch has a row for each sample."""
        # The first dimension alone would not tell: where a pipeline goes through the samples one
        # by one, it may be channels, and as many as there are samples.
        return (
            torch.is_tensor(made)
            and self.samples is not None
            and made.shape[:1] == self.samples[:1] == (len(self.values),)
            and made.numel() >= self.samples.numel()
        )

    def _read(self) -> float:
        self.used = True
        if self.common is not None:
            return self.common
        self.divided = True
        return self.first


def _by_rows(
    function: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    """Run an operation of torch whose scales have a value for each sample."""
    scales = [each for each in (*args, *named.values()) if isinstance(each, RunningScale)]

    def result(value_of: Callable[[RunningScale], float]) -> Any:
        places = dict(enumerate(args))
        return function(*_read(places, value_of).values(), **_read(named, value_of))

    def row(index: int) -> torch.Tensor:
        whole: torch.Tensor = result(lambda scale: scale.values[index])
        return whole[index]

    in_place = function.__name__.rstrip("_") != function.__name__ or "out" in named
    made = result(lambda scale: scale.first)
    if in_place or not all(scale.has_row_for_each(made) for scale in scales):
        for scale in scales:
            scale.divided = True
        return made
    return torch.stack([row(index) for index in range(len(made))])


def _read(
    arguments: Mapping[Any, Any], value_of: Callable[[RunningScale], float]
) -> dict[Any, Any]:
    """The arguments with values for scales."""
    return {
        name: value_of(each) if isinstance(each, RunningScale) else each
        for name, each in arguments.items()
    }


def _comparison(name: str) -> Callable[[RunningScale, Any], bool]:
    compare = getattr(float, name)

    def noted(self: RunningScale, other: Any) -> bool:
        answer: bool = compare(self, other)
        if answer is not NotImplemented:
            self._answers[name, other] = answer
        return answer

    return noted


def _arithmetic(name: str) -> Callable[..., Any]:
    operate = getattr(float, name)

    def live(self: RunningScale, *others: Any) -> Any:
        if others and operate(1.0, *others) is NotImplemented:  # torch's turn
            return NotImplemented
        return operate(self._read(), *others)

    return live


for _name in _COMPARISONS:
    setattr(RunningScale, _name, _comparison(_name))


for _name in _ARITHMETIC:
    setattr(RunningScale, _name, _arithmetic(_name))


_NAMES = ("guidance_scale", "true_cfg_scale")


# bfloat16 rounds by 0.4 %, twice.
_ROUNDING = 0.01


class Guidance(Feature):
    """Lets the guidance of requests be changed while they run."""

    @classmethod
    def of(cls, parts: Parts) -> Self:
        """Return it; any request may be changed."""
        del parts
        return cls()

    def attach(self, run: Run) -> None:
        """Have the pipeline called with scales that can be changed."""
        guidance = RunningGuidance(run.slots, run.arguments, type(run.pipe))
        run.notes[self] = guidance
        run.arguments |= guidance.scales
        run.after_encode.append(guidance.enter_loop)

    def steer(self, run: Run, slot: Slot, wanted: Mapping[str, float | None]) -> None:
        """Take changes of a request for the next step."""
        run.notes[self].steer(run, slot, wanted)


class RunningGuidance:
    """The scales of one pipeline call.

    Attributes:
        scales: By their names.
    """

    def __init__(
        self, slots: Sequence[Slot], arguments: Mapping[str, Any], pipeline_class: Any
    ) -> None:
        """Let `slots`, in the order of their samples, change the scales of `arguments`."""
        self.scales: dict[str, RunningScale] = {}
        self._defaults: dict[str, float] = {}
        self._kept: set[str] = set()
        # By request and scale: the value before and the one wanted, until it is seen to be read.
        self._unconfirmed: dict[tuple[Slot, str], tuple[float, float]] = {}
        self._refused: dict[tuple[Slot, str], float] = {}
        self._edited: set[Slot] = set()
        self._factor: float | None = None
        taken = arguments_of(pipeline_class)
        samples = 0
        for slot in slots:
            samples += slot.parameters.num_outputs_per_prompt
        for name in _NAMES:
            default = default_of(taken, name)
            if isinstance(default, (int, float)):
                self._defaults[name] = default
            value = arguments.get(name, default)
            if name in taken and isinstance(value, (int, float)):
                self.scales[name] = RunningScale(value, samples)

    def enter_loop(self, _run: Run) -> None:
        """Note that the first step begins: what was computed of a scale so far will stay."""
        for name, scale in self.scales.items():
            if scale.used:
                self._kept.add(name)

    def steer(self, run: Run, slot: Slot, wanted: Mapping[str, float | None]) -> None:
        """Take changes of a request for the next step of `run`, or refuse them with a warning."""
        for name, asked in wanted.items():
            scale = self.scales.get(name)
            value = self._defaults.get(name) if asked is None else asked
            if value is None or self._refused.get((slot, name)) == value:
                continue
            if scale is None:
                self._refuse(slot, name, value)
            elif scale.values[run.rows_of(slot)][0] != value:
                over = run.step >= run.steps
                if over or name in self._kept or not scale.can_become(value):
                    self._refuse(slot, name, value)
                else:
                    self._change(run, slot, name, value)

    def confirm(self, run: Run) -> None:
        """After a step, see what became of the changes before it.

        Where a request cannot change as the others stay, it is sent away to begin anew.
        """
        for (slot, name), (before, wanted) in self._unconfirmed.items():
            if not slot.ended and not self.scales[name].used:
                self.scales[name].set(run.rows_of(slot), before)
                self._refuse(slot, name, wanted)
        self._unconfirmed.clear()
        for scale in self.scales.values():
            if scale.divided:
                for slot in run.slots:
                    rows = run.rows_of(slot)
                    if not slot.ended and scale.values[rows][0] != scale.first:
                        scale.set(rows, scale.first)
                        slot.run_by_itself()
            self._look_anew(scale, run)

    def steered_call(self, denoiser: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return a denoiser call's arguments with the guidance of now."""
        scale, guidance = self.scales.get("guidance_scale"), kwargs.get("guidance")
        if scale is None or not torch.is_tensor(guidance):
            return kwargs
        if not self._unconfirmed and scale.common == scale.first:
            return kwargs
        factor = self._factor_of(guidance, scale.first, denoiser)
        if factor is None:
            return kwargs
        if scale.common is not None:
            steered = torch.full_like(guidance, scale.common)
        elif guidance.ndim == 1 and len(guidance) % len(scale.values) == 0:
            repeats = len(guidance) // len(scale.values)
            steered = guidance.new_tensor(scale.values * repeats)
        else:
            scale.used = scale.divided = True
            return kwargs
        scale.used = True
        return {**kwargs, "guidance": steered if factor == 1 else steered * factor}

    def _factor_of(self, guidance: torch.Tensor, first: float, denoiser: Any) -> float | None:
        """What the pipeline multiplies the scale by for the denoiser; None where it does not show.

        Only powers of ten are taken for one: the argument may be of another scale.
        """
        if manners_of(denoiser).plain_guidance:
            return 1.0
        if self._factor is None and first > 0:
            ratio = guidance.flatten()[0].item() / first
            powers = (10.0**exponent for exponent in range(-3, 4))
            fitting = [each for each in powers if abs(ratio / each - 1) < _ROUNDING]
            self._factor = fitting[0] if fitting else None
        return self._factor

    def _change(self, run: Run, slot: Slot, name: str, value: float) -> None:
        if not self._edited:  # from the first change on; before it nothing of this is called
            run.at_step.append(self.confirm)
            run.before_forward.append(self.steered_call)
            for scale in self.scales.values():
                self._look_anew(scale, run)
        scale, rows = self.scales[name], run.rows_of(slot)
        self._unconfirmed[slot, name] = scale.values[rows][0], value
        scale.set(rows, value)
        if slot not in self._edited:  # should it begin anew, it is to change here
            self._edited.add(slot)
            slot.steer_from = run.step

    def _look_anew(self, scale: RunningScale, run: Run) -> None:
        scale.used = scale.divided = False
        scale.samples = None if run.latents is None else run.latents.shape

    def _refuse(self, slot: Slot, name: str, wanted: float) -> None:
        self._refused[slot, name] = wanted
        warning = f"{name} could not be changed to {wanted:g} while running"
        if warning not in slot.warnings:
            slot.warnings.append(warning)
