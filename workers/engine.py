"""The engine of one replica: a loaded pipeline that turns parameters into images or videos.

`generate` may be called from many threads at once: each call runs a shallow copy of the pipeline,
which shares the weights and has its own noise scheduler; inside their loops they meet at the
rendezvous and share denoiser calls. Knows no Redis, no Celery, no HTTP and no file format.
"""

import gc
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from PIL import Image

from configs.errors import (
    DeviceLost,
    GenerationError,
    GenerationFailed,
    ModelLoadFailed,
    NonFiniteOutput,
    OutOfMemory,
    ServingError,
)
from configs.pipeline_settings import PipelineSettings, WarmupShape
from configs.stages import ReplicaPlan
from routing.parameters import FROM_IMAGE_TASKS, INPAINT, Abilities, Parameters
from workers.abilities import inspect_abilities
from workers.company_proof import is_right_in_company
from workers.device_chunk import DeviceChunk
from workers.device_faults import is_device_lost
from workers.failure_cause import is_out_of_memory, short_cause
from workers.finite import watch_decoder
from workers.generation import Generation
from workers.inputs import Inputs
from workers.observer import Observer, SilentObserver
from workers.pipeline_loader import load_pipeline
from workers.pipeline_runs import PipelineRuns
from workers.pipeline_settings import finish_settings
from workers.precision import Precision
from workers.rendezvous import Rendezvous
from workers.seat import Seat

__all__ = ["Engine", "Generation"]

logger = logging.getLogger(__name__)

_FLOAT32 = "made in float32, because in the dtype of the model NaN or infinity came of it"


class Engine:
    """One pipeline on one device chunk; make it with :meth:`load`."""

    def __init__(
        self,
        pipe: Any,
        abilities: Abilities,
        settings: PipelineSettings | None = None,
        max_num_seqs: int = 1,
    ) -> None:
        """Serve `pipe`, which the engine owns from here on and which has its settings already.

        It serves up to `max_num_seqs` requests at once.

        Raises:
            ModelLoadFailed: The pipeline takes no adapters, or has no cache of the kind set.
        """
        settings = settings or PipelineSettings()
        self._pipe = pipe
        self._max_num_seqs = max_num_seqs
        self._warmup_shapes = settings.warmup_shapes
        self._one_at_a_time: AbstractContextManager[Any] = (
            threading.Lock() if settings.one_at_a_time else nullcontext()
        )
        self._chunk = DeviceChunk()
        self._precision = Precision(pipe)
        watch_decoder(getattr(pipe, "vae", None))
        self._runs = PipelineRuns(pipe, abilities, settings)
        self.abilities = replace(abilities, loras=self._runs.loras)

    @classmethod
    def load(cls, plan: ReplicaPlan) -> Self:
        """Load the model of `plan` onto its devices; takes seconds to minutes.

        Raises:
            ModelLoadFailed: With the model, the cause and a mend.
        """
        pipe = load_pipeline(plan)
        settings = plan.stage.engine_args.pipeline
        abilities = inspect_abilities(pipe, plan.stage.default_sampling_params)
        chunk = DeviceChunk.open(pipe, plan)
        finish_settings(pipe, settings)
        engine = cls(pipe, abilities, settings, plan.stage.engine_args.max_num_seqs)
        engine._chunk = chunk
        return engine

    def watch_devices(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason, in a thread, once no run can succeed any more.

        That is when a rank has ended; what a run meets itself is raised as :class:`DeviceLost`.
        """
        self._chunk.watch(on_lost)

    def close(self) -> None:
        """End what works for the engine outside of its runs; it must have none any more."""
        self._chunk.close()

    def warm_up(self) -> None:
        """Make one output of each warm-up size in two steps, so that no client gets the slow run.

        The default size comes first, then those of `warmup_shapes`.

        Raises:
            GenerationError: When the model cannot make it; the replica must not become ready.
        """
        usual = WarmupShape(self.abilities.default_width, self.abilities.default_height)
        for shape in dict.fromkeys((usual, *self._warmup_shapes)):
            self._warm_up(shape)
        self.abilities = replace(self.abilities, preview=self._runs.preview.ready)
        # A cache keeps requests apart anyway.
        if self._max_num_seqs > 1 and not self._runs.step_cache.on:
            self._runs.in_company = [
                task
                for task in self._runs.tasks_for_company
                if self._is_right_in_company(task, usual)
            ]

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the denoising loops of the requests meet."""
        return self._runs.rendezvous

    @property
    def requests_waiting(self) -> int:
        """Requests and runs that wait for their turn to encode or decode."""
        return self._runs.turns.waiting

    def request_coming(self) -> AbstractContextManager[None]:
        """Say that this thread may be about to call :meth:`generate`, within milliseconds.

        Those that come at once start together, and a lone request needs to wait for nobody.
        """
        return self._runs.turns.coming()

    def _is_right_in_company(self, task: str, shape: WarmupShape) -> bool:
        changes: dict[str, Any] = {"task": task}
        if task in FROM_IMAGE_TASKS and self.abilities.strength:
            # Two steps from half way, where the image still shows.
            changes |= {"strength": 0.5, "num_inference_steps": 4}
        parameters = self._warm_up_parameters(shape).with_changes(changes)
        return is_right_in_company(
            parameters,
            str(getattr(self._pipe, "dtype", "")).removeprefix("torch."),
            lambda asked, inputs: self.generate(asked, SilentObserver(), inputs),
            self._runs.serve_at_once,
        )

    def _warm_up(self, shape: WarmupShape) -> None:
        abilities = self.abilities
        multiple = abilities.size_multiple
        if shape.width % multiple or shape.height % multiple:
            raise ModelLoadFailed(
                f"engine_args.warmup_shapes: {shape.width}x{shape.height} is not a multiple of "
                f"{multiple}, as {type(self._pipe).__name__} needs it"
            )
        parameters = self._warm_up_parameters(shape)
        size = (parameters.width, parameters.height)
        inputs = Inputs(
            images=(Image.new("RGB", size, "gray"),) if parameters.task in FROM_IMAGE_TASKS else (),
            mask=Image.new("L", size, "white") if parameters.task == INPAINT else None,
        )
        self.generate(parameters, SilentObserver(), inputs)

    def _warm_up_parameters(self, shape: WarmupShape) -> Parameters:
        abilities = self.abilities
        task, frames = abilities.tasks[0], abilities.default_frames
        return Parameters(
            prompt="warm-up",
            seed=0,
            task=task,
            width=shape.width,
            height=shape.height,
            # A cache shows only late in a run whether it fits the family.
            num_inference_steps=min(
                abilities.default_steps, 100 if self._runs.step_cache.on else 2
            ),
            guidance_scale=abilities.default_guidance_scale if abilities.guidance_scale else None,
            num_frames=frames and (shape.num_frames or frames),
            fps=abilities.default_fps,
        )

    def generate(
        self, parameters: Parameters, observer: Observer, inputs: Inputs | None = None
    ) -> Generation:
        """Make the outputs of one request, whose parameters fit the abilities; thread-safe.

        `inputs` are the decoded images that the parameters name. Those whose pixels a task starts
        from are cut to the size of the output; editing models get them as they are.

        Output k is made with a generator of its own, on the CPU, seeded with `seed + k`. Alone it
        makes the same bytes each time; beside others it shares denoiser calls, which rounds
        differently in the last places, unless it is `deterministic`.

        Raises:
            Interrupted: When the observer raised it; the engine is as before the call.
            OutOfMemory: The memory of the run is free again.
            NonFiniteOutput: NaN or infinity came instead of an output, in float32 too.
            LoraLoadFailed: An adapter can not be read or does not fit; the others are as before.
            DeviceLost: No run of this process can succeed any more, whoever is to blame.
            GenerationFailed: Anything else the pipeline raised; the log has its traceback.
        """
        try:
            with self._one_at_a_time:
                return self._generate_finite(parameters, observer, inputs or Inputs())
        except ServingError:
            raise
        except Exception as error:
            failure = _as_failure(error, parameters, self._pipe._execution_device.type)
            if isinstance(failure, OutOfMemory):
                # Without the traceback: a log handler that keeps it would keep the tensors too.
                logger.warning("%s (%s)", failure, short_cause(error))
            else:
                logger.exception("the pipeline failed")
        # Raised out here, so that no traceback keeps the tensors of the run.
        if isinstance(failure, OutOfMemory):
            gc.collect()
            torch.cuda.empty_cache()
        raise failure

    def device_memory_bytes(self) -> int | None:
        """Return the bytes that this process holds of its CUDA devices; None on a CPU."""
        if self._pipe._execution_device.type != "cuda":
            return None
        return sum(
            torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count())
        )

    def _generate_finite(
        self, parameters: Parameters, observer: Observer, inputs: Inputs
    ) -> Generation:
        """Make the outputs; once more, in float32, where the model's dtype was too small for them.

        For the observer that is a run from the start.
        """

        def tell() -> None:
            observer.on_step(0, parameters.num_inference_steps)

        try:
            with self._precision.usual(tell):
                return self._runs.serve(Seat(parameters, observer, inputs))
        except NonFiniteOutput as error:
            if not (self._chunk.takes_float32 and self._precision.can_rise):
                raise
            first = str(error)
        logger.warning("%s; once more in float32", first)
        try:
            with self._precision.raised(tell, self._chunk.in_float32()):
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
            return replace(made, warnings=(*made.warnings, _FLOAT32))
        # Out here, where no traceback holds the memory of the run any more.
        gc.collect()
        torch.cuda.empty_cache()
        raise NonFiniteOutput(f"{first} (a run in float32 failed: {again})")


def _as_failure(error: Exception, parameters: Parameters, device: str) -> GenerationError:
    if is_device_lost(error, device):
        return DeviceLost(f"the device answers no more: {short_cause(error)}")
    if is_out_of_memory(error):
        size = f"{parameters.num_outputs_per_prompt} x {parameters.width}x{parameters.height}"
        if parameters.num_frames is not None:
            size += f" with {parameters.num_frames} frames"
        return OutOfMemory(f"too little memory for {size}; ask for a smaller size or fewer outputs")
    return GenerationFailed(f"the pipeline failed: {short_cause(error)}")
