"""Checks of merged calls: whether each got what it gets alone."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from workers.sharing.argument_rules import ALIKE, BY_FRAME, BY_SECOND, LAYERS, SHARED
from workers.sharing.call import Call
from workers.sharing.merging import merge, pick, split

# Largest difference that counts as rounding, in parts of the largest value; other types are coarse.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}


_COARSE = 5e-2


def excess(output: Any, expected: Any) -> float:
    """Return the largest difference of two outputs, in parts of what rounding may make of it.

    Up to 1 they are the same; outputs of different make differ infinitely. NaN and infinity equal
    themselves: a model that is broken is so alone as well.
    """
    pairs = zip(list(_tensors(output)), list(_tensors(expected)), strict=False)
    if _make(output) != _make(expected):
        return float("inf")
    return max((_excess(one, other) for one, other in pairs), default=0.0)


def spread(output: Any, expected: Any) -> float:
    """Return the root mean square of the difference of two outputs, in parts of the expected one's.

    They are of the same make.
    """
    pairs = list(zip(_tensors(output), _tensors(expected), strict=True))
    apart = sum(float((a.double() - b.double()).nan_to_num().square().sum()) for a, b in pairs)
    whole = sum(float(b.double().nan_to_num().square().sum()) for _, b in pairs)
    return math.sqrt(apart / max(whole, 1e-300))


def step_of(output: Any) -> float | None:
    """Return how far neighbouring numbers near 1 are apart in a coarse type; None for fine ones."""
    types = {each.dtype for each in _tensors(output)} - _ROUNDING.keys()
    return max((torch.finfo(each).eps for each in types if each.is_floating_point), default=None)


def _excess(one: torch.Tensor, other: torch.Tensor) -> float:
    allowed = _ROUNDING.get(other.dtype, _COARSE)
    first, second = (each.detach().double().nan_to_num() for each in (one, other))
    if not first.numel():
        return 0.0
    scale = second.abs().max().clamp_min(1e-30)
    return float((first - second).abs().max() / scale) / allowed


def _make(output: Any) -> Any:
    if torch.is_tensor(output):
        return output.dtype, tuple(output.shape)
    if isinstance(output, dict):
        return type(output), tuple((name, _make(item)) for name, item in output.items())
    if isinstance(output, (list, tuple)):
        return type(output), tuple(map(_make, output))
    return type(output)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)


# An argument, and which of the rows that each call has of it.
Place = tuple[str, int]


class Differences:
    """Where calls differ, compared on the device and not read yet."""

    def __init__(self, compared: Iterable[tuple[Place, torch.Tensor | bool]]) -> None:
        """Take for each place whether calls differ there: a truth value, mostly on a device."""
        self._compared = list(compared)

    def read(self) -> set[Place]:
        """Return the places where they differ; waits for each device once."""
        flags: dict[torch.device, list[tuple[Place, torch.Tensor]]] = {}
        found = set()
        for place, differ in self._compared:
            if torch.is_tensor(differ):
                flags.setdefault(differ.device, []).append((place, differ))
            elif differ:
                found.add(place)
        for pairs in flags.values():
            read = torch.stack([flag for _, flag in pairs]).tolist()
            found |= {place for (place, _), differ in zip(pairs, read, strict=True) if differ}
        return found


def new_differences(
    merged: Mapping[str, Any], rows: Sequence[int], known: Container[Place]
) -> Differences:
    """Compare where calls of so many rows differ in their merged arguments, but `known` places."""
    starts = [end - count for end, count in zip(accumulate(rows), rows, strict=True)]
    return Differences(
        ((name, place), _differ(value, [start + place for start in starts]))
        for name, value in _values(merged, sum(rows))
        for place in range(min(rows))
        if (name, place) not in known
    )


def _values(arguments: Mapping[str, Any], rows: int) -> Iterator[tuple[str, Any]]:
    """What has a row for each sample, by its names."""
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", each) for key, each in _values(value, rows))
        elif name in SHARED | ALIKE or not isinstance(value, (torch.Tensor, list, tuple)):
            continue
        elif name in LAYERS:
            yield from ((f"{name}.{layer}", each) for layer, each in enumerate(value))
        elif name in BY_SECOND and torch.is_tensor(value):
            yield name, value.transpose(0, 1)
        elif name in BY_FRAME and torch.is_tensor(value):
            yield name, value.reshape(rows, -1, *value.shape[1:])
        elif len(value):
            yield name, value


def _differ(value: Any, places: Sequence[int]) -> torch.Tensor | bool:
    if not torch.is_tensor(value):
        each = [value[place] for place in places]
        if len({one.shape for one in each}) > 1:
            return True
        value, places = torch.stack(each), range(len(each))
    step = places[1] - places[0]
    chosen: torch.Tensor
    if list(range(places[0], len(value), step)) == list(places):
        chosen = value[places[0] :: step]  # without a copy, as calls are alike as a rule
    else:
        chosen = pick(value, places)
    differ: torch.Tensor = (chosen != chosen[:1]).any()
    return differ


# As much as that of copies, times this, may rounding make of other values.
_AS_MUCH = 2.5


# Where copies come out equal to the byte: parts of the step between two numbers near 1. Padding is
# another kernel of attention, whose rounding copies do not show.
_LEAST, _LEAST_PADDED = 0.25, 1.0


def worst_excess(group: Sequence[Call], parts: Sequence[Any], *, padded: bool) -> float:
    """Return how far the parts of a merged forward are from what the calls gave alone.

    In parts of what rounding may make of it: up to 1 they are the same.
    """
    pairs = [(part, call.output) for part, call in zip(parts, group, strict=True)]
    worst = max(excess(part, alone) for part, alone in pairs)
    step = step_of(pairs[0][1])
    if worst > 1 or step is None:
        return worst
    allowed = max(_AS_MUCH * _spread_of_copies(group), step * (_LEAST_PADDED if padded else _LEAST))
    return max(spread(part, alone) for part, alone in pairs) / allowed


def _spread_of_copies(group: Sequence[Call]) -> float:
    call = min(group, key=lambda each: each.rows)
    assert call.layout is not None
    rows = [call.rows] * len(group)
    output = call.forward(**merge([call.arguments] * len(group), rows))
    return max(spread(each, call.output) for each in split(output, rows, call.layout.form))
