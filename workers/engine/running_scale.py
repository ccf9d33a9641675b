"""A guidance scale that changes while a pipeline uses it.

Pipelines take the scale once, decide by it (`> 1`) how to lay out their batch, and multiply by it
at each step: by an attribute, or by a copy of their own that nobody can reach. So they are given a
number whose uses see what it is now. Decisions stay those of the start. Whether it was used is
noted, since a change counts only where it was. Does not know pipelines and who changes it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch

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
