"""Some rows of a denoiser call taken out as a call of their own, and outputs put back in place.

By the same rules as ``workers.denoiser.merging``, for a call that it could describe. Does not know
whose the rows are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workers.denoiser.argument_rules import (
    BY_FRAME,
    BY_SECOND,
    LAYERS,
    POSITION_ROWS,
    SHARED,
    TIMES,
)
from workers.denoiser.merging import Arguments, Unmergeable

# Dimensions of positions that each sample has a row of.
_OF_EACH = 3


def choose_rows(arguments: Arguments, chosen: Sequence[int], rows: int) -> dict[str, Any]:
    """Return the arguments of a call of `rows` rows for the `chosen` ones alone, in that order."""
    return {name: _choose(name, value, chosen, rows) for name, value in arguments.items()}


def place_rows(outputs: Sequence[Any], places: Sequence[Sequence[int]], rows: int) -> Any:
    """Put the rows of `outputs` in their places among `rows`; those of nobody are zero.

    Raises:
        Unmergeable: An output has not the rows of its call.
    """
    first = outputs[0]
    if first is None:
        return None
    if type(first) is tuple:
        return tuple(place_rows(items, places, rows) for items in zip(*outputs, strict=True))
    if isinstance(first, dict):
        make: Any = type(first)
        return make(
            **{name: place_rows([each[name] for each in outputs], places, rows) for name in first}
        )
    if any(len(output) != len(place) for output, place in zip(outputs, places, strict=True)):
        raise Unmergeable("output")
    if torch.is_tensor(first):
        placed = first.new_zeros((rows, *first.shape[1:]))
        for output, place in zip(outputs, places, strict=True):
            placed[torch.tensor(place, device=placed.device)] = output
        return placed
    listed = [torch.zeros_like(first[0])] * rows
    for output, place in zip(outputs, places, strict=True):
        for row, index in zip(output, place, strict=True):
            listed[index] = row
    return type(first)(listed)


def _choose(name: str, value: Any, chosen: Sequence[int], rows: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _choose(key, each, chosen, rows) for key, each in value.items()}
    if torch.is_tensor(value):
        return _choose_of_tensor(name, value, chosen, rows)
    if isinstance(value, (list, tuple)) and name in SHARED | LAYERS:
        return type(value)(_choose(name, each, chosen, rows) for each in value)
    if isinstance(value, (list, tuple)) and len(value) == rows:
        return type(value)(value[index] for index in chosen)
    return value


def _choose_of_tensor(name: str, value: torch.Tensor, chosen: Sequence[int], rows: int) -> Any:
    one_for_all = name in TIMES and value.ndim < 2 and value.numel() == 1
    rows_of_positions = name in POSITION_ROWS and value.ndim == _OF_EACH
    if one_for_all or (name in SHARED and not rows_of_positions):
        return value
    indices = torch.tensor(chosen, device=value.device)
    if name in BY_SECOND:
        return value[:, indices]
    if name in BY_FRAME and len(value) != rows:
        return value.reshape(rows, -1, *value.shape[1:])[indices].flatten(0, 1)
    return value[indices]
