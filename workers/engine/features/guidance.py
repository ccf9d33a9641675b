"""Guidance that requests may change between two steps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch

from workers.engine.arguments import arguments_of, default_of
from workers.engine.batch import OutputRows, Slot
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
        samples: Shape of all samples, one row for each; None while it is not known.
        used: Whether it was read as it is now, since this was last set back.
        divided: Whether samples have values of their own and it was read in a way that has none;
            then it was read as `first`.
    """

    first: float
    values: list[float]
    samples: torch.Size | None
    used: bool
    divided: bool
    _answers: dict[tuple[str, Any], bool]

    def __new__(cls, value: float, samples: int = 1) -> Self:
        """Begin with `value` for so many samples."""
        scale = super().__new__(cls, value)
        scale.first = float.__float__(scale)
        scale.values = [scale.first] * samples
        scale.samples = None
        scale.used = scale.divided = False
        scale._answers = {}
        return scale

    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        return self != 0.0

    @property
    def alike(self) -> bool:
        """Whether all samples have the same value."""
        return len(set(self.values)) == 1

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
        named = kwargs or {}
        scales = [each for each in args if isinstance(each, cls)]
        if named:
            scales += [each for each in named.values() if isinstance(each, cls)]
        if not scales:
            return NotImplemented
        for scale in scales:
            scale.used = True
        if not all(scale.alike for scale in scales):
            return _by_rows(scales, function, args, named)
        # Each step of each run comes by here.
        plain = [each.values[0] if isinstance(each, cls) else each for each in args]
        if not named:
            return function(*plain)
        return function(*plain, **_read(named, lambda scale: scale.values[0]))

    def _has_row_for_each(self, made: Any) -> bool:
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
        if self.alike:
            return self.values[0]
        self.divided = True
        return self.first


def _by_rows(
    scales: Sequence[RunningScale],
    function: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    """Run an operation of torch whose scales have a value for each sample."""

    def result(value_of: Callable[[RunningScale], float]) -> Any:
        places = dict(enumerate(args))
        return function(*_read(places, value_of).values(), **_read(named, value_of))

    def row(index: int) -> torch.Tensor:
        whole: torch.Tensor = result(lambda scale: scale.values[index])
        return whole[index]

    in_place = function.__name__.rstrip("_") != function.__name__ or "out" in named
    made = result(lambda scale: scale.first)
    if in_place or not all(scale._has_row_for_each(made) for scale in scales):
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


class RunningGuidance:
    """The scales of one pipeline call."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Let `slots`, in the order of their samples, change what they asked for."""
        self._slots = slots
        self._rows = OutputRows(slots)
        self._scales: dict[str, RunningScale] = {}
        self._defaults: dict[str, float] = {}
        self._kept: set[str] = set()
        self._steered: set[int] = set()
        # By request and scale: the value before and the one wanted, until it is seen to be read.
        self._unconfirmed: dict[tuple[int, str], tuple[float, float]] = {}
        self._refused: dict[tuple[int, str], float] = {}
        self._factor: float | None = None

    def watched(self, arguments: Mapping[str, Any], pipeline_class: Any) -> dict[str, Any]:
        """Return the arguments of the pipeline's call with scales that can be changed."""
        taken = arguments_of(pipeline_class)
        for name in _NAMES:
            default = default_of(taken, name)
            if isinstance(default, (int, float)):
                self._defaults[name] = default
            value = arguments.get(name, default)
            if name in taken and isinstance(value, (int, float)):
                self._scales[name] = RunningScale(value, self._rows.total)
        return {**arguments, **self._scales}

    def enter_loop(self) -> None:
        """Note that the first step begins: what was computed of a scale so far will stay."""
        self._kept = {name for name, scale in self._scales.items() if scale.used}

    def at_boundary(
        self, step: int, present: Sequence[bool], samples: torch.Tensor | None, *, over: bool
    ) -> None:
        """See what became of the changes of the last step, and take those for the next.

        Of the requests that are `present`. `over` says that there is no next one. Where a request
        cannot change as the others stay, it is sent away to begin anew.
        """
        for (index, name), (before, wanted) in self._unconfirmed.items():
            if present[index] and not self._scales[name].used:
                self._set(index, name, before)
                self._refuse(index, name, wanted)
        self._unconfirmed.clear()
        for name, scale in self._scales.items():
            if scale.divided:
                for index, slot in enumerate(self._slots):
                    if present[index] and self._value(index, name) != scale.first:
                        self._set(index, name, scale.first)
                        slot.run_by_itself()
            scale.used = scale.divided = False
            scale.samples = None if samples is None else samples.shape
        for index, slot in enumerate(self._slots):
            if present[index] and not slot.ended:
                self._hear(index, step, over=over)

    def steered_call(self, denoiser: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a denoiser call's arguments with the guidance of now; None to leave them."""
        scale, guidance = self._scales.get("guidance_scale"), kwargs.get("guidance")
        if scale is None or not torch.is_tensor(guidance):
            return None
        if not self._unconfirmed and scale.alike and scale.values[0] == scale.first:
            return None
        factor = self._factor_of(guidance, scale.first, denoiser)
        if factor is None:
            return None
        if scale.alike:
            steered = torch.full_like(guidance, scale.values[0])
        elif guidance.ndim == 1 and len(guidance) % len(scale.values) == 0:
            repeats = len(guidance) // len(scale.values)
            steered = guidance.new_tensor(scale.values * repeats)
        else:
            scale.used = scale.divided = True
            return None
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

    def _hear(self, index: int, step: int, *, over: bool) -> None:
        slot = self._slots[index]
        for name, wish in slot.wanted_guidance(step).items():
            scale = self._scales.get(name)
            wanted = self._defaults.get(name) if wish is None else wish
            if wanted is None or self._refused.get((index, name)) == wanted:
                continue
            if scale is None or over or name in self._kept or not scale.can_become(wanted):
                if scale is None or self._value(index, name) != wanted:
                    self._refuse(index, name, wanted)
            elif self._value(index, name) != wanted:
                self._unconfirmed[index, name] = self._value(index, name), wanted
                self._set(index, name, wanted)
                if index not in self._steered:  # should it begin anew, it is to change here
                    self._steered.add(index)
                    slot.steer_from = step

    def _value(self, index: int, name: str) -> float:
        return self._scales[name].values[self._rows.of(self._slots[index])][0]

    def _set(self, index: int, name: str, value: float) -> None:
        slot = self._slots[index]
        self._scales[name].values[self._rows.of(slot)] = [value] * slot.outputs

    def _refuse(self, index: int, name: str, wanted: float) -> None:
        self._refused[index, name] = wanted
        warning = f"{name} could not be changed to {wanted:g} while running"
        if warning not in self._slots[index].warnings:
            self._slots[index].warnings.append(warning)
