"""How many tensors there are, with Python's garbage collector at rest."""

import gc
from collections.abc import Callable

import torch


def growth(run: Callable[[], object]) -> int:
    """Return how many tensors live after `run` that did not before, and need no more collecting."""
    gc.collect()
    gc.disable()
    try:
        before = _living()
        run()
        return _living() - before
    finally:
        gc.enable()


def _living() -> int:
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
