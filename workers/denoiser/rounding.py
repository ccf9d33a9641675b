"""Whether two outputs of a denoiser are the same but for rounding. Knows no calls and no models."""

import math
from collections.abc import Iterator
from typing import Any

import torch

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
