"""How one call of a denoiser becomes several with fewer rows, and their outputs one again.

The other way round of ``workers.merging``, by the same rules. Does not know devices.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from workers.argument_rules import ALIKE, SHARED, TIMES
from workers.merging import Arguments, Unmergeable


def even_counts(rows: int, parts: int) -> list[int]:
    """Return the rows of each of up to `parts` parts, as even as can be, none empty."""
    parts = min(rows, parts)
    return [rows // parts + (index < rows % parts) for index in range(parts)]


def cut(arguments: Arguments, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Cut a call, which ``merging.layout`` understands, into calls of so many rows each.

    Raises:
        Unmergeable: An argument has not the sum of the counts as its rows.
    """
    parts = {name: _cut(name, value, counts) for name, value in arguments.items()}
    return [{name: values[index] for name, values in parts.items()} for index in range(len(counts))]


def join(outputs: Sequence[Any], counts: Sequence[int]) -> Any:
    """Put the outputs of calls with so many rows together; raises Unmergeable."""
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        raise Unmergeable("output")
    if type(first) is tuple:
        return tuple(join(items, counts) for items in zip(*outputs, strict=True))
    if isinstance(first, dict):
        make: Any = type(first)
        return make(**{name: join([output[name] for output in outputs], counts) for name in first})
    if first is None:
        return None
    if any(len(output) != rows for output, rows in zip(outputs, counts, strict=True)):
        raise Unmergeable("output")
    if torch.is_tensor(first):
        return torch.cat(list(outputs))
    return type(first)(row for output in outputs for row in output)


def _cut(name: str, value: Any, counts: Sequence[int]) -> list[Any]:
    if name in SHARED and isinstance(value, (list, tuple)):
        items = [_cut(name, each, counts) for each in value]
        return [type(value)(item[index] for item in items) for index in range(len(counts))]
    if torch.is_tensor(value):
        return _cut_tensor(name, value, counts)
    if isinstance(value, dict):
        cuts = {key: _cut(key, each, counts) for key, each in value.items()}
        return [{key: each[index] for key, each in cuts.items()} for index in range(len(counts))]
    if isinstance(value, (list, tuple)) and name in ALIKE and value:
        return [type(value)([value[0]] * rows) for rows in counts]
    if isinstance(value, (list, tuple)):
        _check(name, len(value), counts)
        ends = list(accumulate(counts))
        return [value[end - rows : end] for end, rows in zip(ends, counts, strict=True)]
    return [value] * len(counts)


def _cut_tensor(name: str, value: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    one_for_all = name in TIMES and value.ndim < 2 and value.numel() == 1
    if one_for_all or (name in SHARED and value.ndim < 3):
        return [value] * len(counts)
    _check(name, value.shape[0] if value.ndim else 0, counts)
    return list(torch.split(value, list(counts)))


def _check(name: str, rows: int, counts: Sequence[int]) -> None:
    if rows != sum(counts):
        raise Unmergeable(name)
