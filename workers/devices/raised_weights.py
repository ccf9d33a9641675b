"""Weights raised to float32 where they are, and back to the types they had.

In place, since a copy beside them would need three times the memory of the weights instead of
twice; and what came from half goes back to it without loss. Knows no runs and no processes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_PLAIN = (torch.nn.Parameter, torch.Tensor)
_LOWER = frozenset({torch.float16, torch.bfloat16})


def can_rise(modules: Iterable[torch.nn.Module]) -> bool:
    """Tell whether there are weights below float32, all of them plain ones that can be changed.

    Quantized weights, and weights that are fetched from elsewhere when they are needed, cannot.
    """
    tensors = _tensors(modules)
    plain = all(
        type(tensor) in _PLAIN and type(tensor.data) is torch.Tensor and not tensor.is_meta
        for tensor in tensors
    )
    return plain and any(tensor.dtype in _LOWER for tensor in tensors)


@contextmanager
def in_float32(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Hold the weights in float32 meanwhile.

    Raises:
        torch.OutOfMemoryError: They do not fit twice; they are as before.
    """
    lowered: list[tuple[torch.Tensor, torch.dtype]] = []
    try:
        for tensor in _tensors(modules):
            if tensor.dtype in _LOWER:
                dtype = tensor.dtype
                tensor.data = tensor.data.float()
                lowered.append((tensor, dtype))
        yield
    finally:
        for tensor, dtype in lowered:
            tensor.data = tensor.data.to(dtype)
        torch.cuda.empty_cache()


def _tensors(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """All weights and buffers, each once."""
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return list({id(tensor): tensor for tensor in found}.values())
