"""Runs that end in numbers: once more in float32, where the model's dtype was too small for them.

Knows no threads, and not how weights are raised.
"""

import gc
import logging
from dataclasses import replace
from typing import Any

import torch

from configs.errors import DeviceLost, NonFiniteOutput
from routing.parameters import Parameters
from workers.denoiser.failure_cause import short_cause
from workers.devices.device_chunk import DeviceChunk
from workers.devices.device_faults import is_device_lost
from workers.engine.finite import watch_decoder
from workers.engine.generation import Generation
from workers.engine.inputs import Inputs
from workers.engine.observer import Observer
from workers.engine.pipeline_runs import PipelineRuns
from workers.engine.precision import Precision
from workers.engine.seat import Seat

_logger = logging.getLogger(__name__)

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
        self, parameters: Parameters, observer: Observer, inputs: Inputs, chunk: DeviceChunk
    ) -> Generation:
        """Run a request to its end; in float32 it is for the observer a run from the start.

        Raises:
            NonFiniteOutput: NaN or infinity came of it, in float32 too or where that failed.
            BaseException: What else ends it.
        """

        def tell() -> None:
            observer.on_step(0, parameters.num_inference_steps)

        try:
            with self._precision.usual(tell):
                return self._runs.serve(Seat(parameters, observer, inputs))
        except NonFiniteOutput as error:
            if not (chunk.takes_float32 and self._precision.can_rise):
                raise
            first = str(error)
        _logger.warning("%s; once more in float32", first)
        try:
            with self._precision.raised(tell, chunk.in_float32()):
                made = self._runs.serve(Seat(parameters, observer, inputs))
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
