"""The precision of a pipeline: half as a rule, and float32 for a run whose numbers do not fit.

The weights are shared by all runs and are changed in place (``workers.devices.raised_weights``), so
a run in float32 is alone in its replica: it waits until the others have ended, and whoever comes
meanwhile waits for it. Knows no request and no family.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from workers.devices import raised_weights
from workers.devices.denoiser_copies import each_copy

_POLL_S = 0.1


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
        """Whether there are weights below float32, all of them plain ones that can be changed."""
        return raised_weights.can_rise(self._modules())

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
    def raised(
        self, tell: Callable[[], None], elsewhere: AbstractContextManager[None]
    ) -> Iterator[None]:
        """Run in float32, alone; `tell` is called while others still run.

        `elsewhere` raises the weights that other processes have of the pipeline.

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
        try:
            with raised_weights.in_float32(self._modules()), elsewhere:
                yield
        finally:
            with self._changed:
                self._raised = False
                self._changed.notify_all()

    def _modules(self) -> list[torch.nn.Module]:
        """All parts of the pipeline and their copies on other devices."""
        parts = self._pipe.components.values()
        return [
            copied
            for part in parts
            if isinstance(part, torch.nn.Module)
            for copied in each_copy(part)
        ]
