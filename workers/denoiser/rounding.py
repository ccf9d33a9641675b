"""Whether two outputs of a denoiser are the same but for rounding. Knows no calls and no models."""

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
