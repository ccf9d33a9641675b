"""Retries in float32 after NaN or infinity, where the model's dtype was too small."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch

from configs.errors import DeviceLost, NonFiniteOutput
from workers.devices import weights
from workers.devices.chunk import DeviceChunk
from workers.devices.copies import each_copy
from workers.engine.generation import Generation
from workers.engine.run import Feature, Parts, Serve, Slot
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
        return weights.can_rise(self._modules())

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
            with weights.in_float32(self._modules()), elsewhere:
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


_WARNING = "made in float32, because the dtype of the model gave NaN or infinity"


class Float32Retry(Feature):
    """Has a request begin anew in float32 where it gave NaN or infinity."""

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """Return one; None where the weights are float32 already, or cannot become it."""
        retry = cls(parts.pipe, parts.chunk)
        return retry if parts.chunk.supports_float32 and retry.precision.can_rise else None

    def __init__(self, pipe: Any, chunk: DeviceChunk) -> None:
        """Change nothing yet."""
        self.precision = Precision(pipe)
        self._pipe = pipe
        self._chunk = chunk

    def around_request(self, serve: Serve) -> Serve:
        """Return what serves a request again in float32, its steps told from the start again.

        It raises NonFiniteOutput where NaN or infinity came in float32 too, or where that failed.
        """

        def with_retry(slot: Slot) -> Generation:
            def tell() -> None:
                slot.progress.on_step(0, slot.parameters.num_inference_steps)

            try:
                with self.precision.usual(tell):
                    return serve(slot)
            except NonFiniteOutput as error:
                if not self.precision.can_rise:
                    raise
                first = str(error)
            _logger.warning("%s; once more in float32", first)
            return self._again(slot, serve, first, tell)

        return with_retry

    def _again(self, slot: Slot, serve: Serve, first: str, tell: Callable[[], None]) -> Generation:
        again = Slot(slot.parameters, slot.progress, slot.inputs, in_float32=True)
        try:
            with self.precision.raised(tell, self._chunk.in_float32()):
                made = serve(again)
        except NonFiniteOutput as error:
            raise NonFiniteOutput(f"{error} (in float32 too)") from None
        except DeviceLost:
            raise
        except Exception as error:
            if is_device_lost(error, self._pipe.device.type):
                raise
            failed = short_cause(error)
        else:
            return replace(made, warnings=(*made.warnings, _WARNING))
        # Out here, where no traceback holds the memory of the run any more.
        gc.collect()
        torch.cuda.empty_cache()
        raise NonFiniteOutput(f"{first} (a run in float32 failed: {failed})")
