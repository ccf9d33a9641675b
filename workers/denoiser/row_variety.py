"""In which rows the calls of a merged one differ: what a proof of merging speaks for.

A denoiser that reads one row's mask, time or scale for all rows is right as long as the calls agree
in it. So each row of each argument counts as proven only once calls that differ in it were. Knows
neither calls nor denoisers.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from workers.denoiser.argument_rules import ALIKE, BY_FRAME, BY_SECOND, LAYERS, SHARED

# An argument, and which of the rows that each call has of it.
Place = tuple[str, int]


def new_differences(
    merged: Mapping[str, Any], rows: Sequence[int], known: Container[Place]
) -> set[Place]:
    """Return where calls of so many rows differ in their merged arguments, `known` places apart."""
    starts = [end - count for end, count in zip(accumulate(rows), rows, strict=True)]
    return {
        (name, place)
        for name, value in _values(merged, sum(rows))
        for place in range(min(rows))
        if (name, place) not in known and _differ(value, [start + place for start in starts])
    }


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


def _differ(value: Any, places: Sequence[int]) -> bool:
    if not torch.is_tensor(value):
        first = value[places[0]]
        return any(not torch.equal(value[each], first) for each in places[1:])
    step = places[1] - places[0]
    if list(range(places[0], len(value), step)) == list(places):
        chosen = value[places[0] :: step]  # without a copy, as calls are alike as a rule
    else:
        chosen = value[torch.tensor(places, device=value.device)]
    return not torch.equal(chosen, chosen[:1].expand_as(chosen))
