"""The precision of a pipeline: half as a rule, and float32 for a run whose numbers do not fit.

The weights are shared by all runs and are changed in place, so a run in float32 is alone in its
replica: it waits until the others have ended, and whoever comes meanwhile waits for it. In place,
since a copy beside them would need three times the memory of the weights instead of twice; and what
came from half goes back to it without loss. Knows no request and no family.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workers.denoiser_copies import each_copy

_POLL_S = 0.1
_PLAIN = (torch.nn.Parameter, torch.Tensor)
_LOWER = frozenset({torch.float16, torch.bfloat16})


class Precision:
    """The weights of one pipeline, and who may run with them now."""

    def __init__(self, pipe: Any) -> None:
        """Change nothing yet."""
        self._pipe = pipe
        self._changed = threading.Condition()
        self._runs = 0
        self._waiting = 0
        self._raised = False

    @property
    def can_rise(self) -> bool:
        """Whether there are weights below float32, all of them plain ones that can be changed.

        Quantized weights, and weights that are fetched from elsewhere when they are needed, cannot.
        """
        tensors = self._tensors()
        plain = all(
            type(tensor) in _PLAIN and type(tensor.data) is torch.Tensor and not tensor.is_meta
            for tensor in tensors
        )
        return plain and any(tensor.dtype in _LOWER for tensor in tensors)

    @contextmanager
    def usual(self, tell: Callable[[], None]) -> Iterator[None]:
        """Run with the weights as they are; `tell` is called while that has to be waited for."""
        with self._changed:
            while self._raised or self._waiting:
                self._changed.wait(_POLL_S)
                tell()
            self._runs += 1
        try:
            yield
        finally:
            with self._changed:
                self._runs -= 1
                self._changed.notify_all()

    @contextmanager
    def raised(self, tell: Callable[[], None]) -> Iterator[None]:
        """Run in float32, alone; `tell` is called while others still run.

        Raises:
            torch.OutOfMemoryError: The weights do not fit twice; they are as before.
        """
        with self._changed:
            self._waiting += 1
            try:
                while self._raised or self._runs:
                    self._changed.wait(_POLL_S)
                    tell()
                self._raised = True
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        lowered: list[tuple[torch.Tensor, torch.dtype]] = []
        try:
            for tensor in self._tensors():
                if tensor.dtype in _LOWER:
                    dtype = tensor.dtype
                    tensor.data = tensor.data.float()
                    lowered.append((tensor, dtype))
            yield
        finally:
            for tensor, dtype in lowered:
                tensor.data = tensor.data.to(dtype)
            torch.cuda.empty_cache()
            with self._changed:
                self._raised = False
                self._changed.notify_all()

    def _tensors(self) -> list[torch.Tensor]:
        """All weights and buffers of the pipeline, each once."""
        modules = [
            copied
            for part in self._pipe.components.values()
            if isinstance(part, torch.nn.Module)
            for copied in each_copy(part)
        ]
        found = [
            tensor for module in modules for tensor in (*module.parameters(), *module.buffers())
        ]
        return list({id(tensor): tensor for tensor in found}.values())
