"""Retries in float32 after NaN or infinity, where the model's dtype was too small."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from configs.errors import DeviceLost, NonFiniteOutput
from configs.parameters import Parameters
from workers import patches
from workers.devices.chunk import DeviceChunk
from workers.devices.copies import each_copy
from workers.engine.arguments import Inputs
from workers.engine.batch import Slot
from workers.engine.generation import Generation, watch_decoder
from workers.engine.progress import Progress
from workers.engine.runs import PipelineRuns
from workers.failures import is_device_lost, short_cause

_logger = logging.getLogger(__name__)


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
        return patches.can_rise(self._modules())

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
            with patches.in_float32(self._modules()), elsewhere:
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


_WARNING = "made in float32, because in the dtype of the model NaN or infinity came of it"


class FiniteRuns:
    """Runs of one pipeline."""

    def __init__(self, pipe: Any, runs: PipelineRuns) -> None:
        """Have the autoencoder of `pipe` refuse what it makes of numbers too large for its type."""
        self._pipe = pipe
        self._runs = runs
        self._precision = Precision(pipe)
        watch_decoder(getattr(pipe, "vae", None))

    def serve(
        self, parameters: Parameters, progress: Progress, inputs: Inputs, chunk: DeviceChunk
    ) -> Generation:
        """Run a request to its end; in float32 its steps are told from the start again.

        Raises:
            NonFiniteOutput: NaN or infinity came of it, in float32 too or where that failed.
            BaseException: What else ends it.
        """

        def tell() -> None:
            progress.on_step(0, parameters.num_inference_steps)

        try:
            with self._precision.usual(tell):
                return self._runs.serve(Slot(parameters, progress, inputs))
        except NonFiniteOutput as error:
            if not (chunk.supports_float32 and self._precision.can_rise):
                raise
            first = str(error)
        _logger.warning("%s; once more in float32", first)
        try:
            with self._precision.raised(tell, chunk.in_float32()):
                made = self._runs.serve(Slot(parameters, progress, inputs))
        except NonFiniteOutput as error:
            raise NonFiniteOutput(f"{error} (in float32 too)") from None
        except DeviceLost:
            raise
        except Exception as error:
            if is_device_lost(error, self._pipe.device.type):
                raise
            again = short_cause(error)
        else:
            return replace(made, warnings=(*made.warnings, _WARNING))
        # Out here, where no traceback holds the memory of the run any more.
        gc.collect()
        torch.cuda.empty_cache()
        raise NonFiniteOutput(f"{first} (a run in float32 failed: {again})")
