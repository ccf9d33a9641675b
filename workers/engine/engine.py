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

from configs.errors import (
    GenerationFailed,
    OutOfMemory,
    ServingError,
)
from configs.parameters import Abilities, Parameters
from configs.stage_config import PipelineSettings, ReplicaPlan
from workers.devices.chunk import DeviceChunk
from workers.engine.abilities import inspect_abilities
from workers.engine.arguments import Inputs
from workers.engine.features.float32_retry import FiniteRuns
from workers.engine.generation import Generation
from workers.engine.known_settings import find_defaults
from workers.engine.loader import finish_settings, load_pipeline
from workers.engine.progress import Progress, SilentProgress
from workers.engine.runs import PipelineRuns
from workers.engine.warm_up import WarmUpRequests, is_right_in_batch
from workers.failures import run_failure, short_cause
from workers.sharing.rendezvous import Rendezvous

__all__ = ["Engine", "Generation"]

logger = logging.getLogger(__name__)


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
        self._runs = PipelineRuns(pipe, abilities, settings)
        self._finite_runs = FiniteRuns(pipe, self._runs)
        self.abilities = replace(abilities, loras=self._runs.loras)

    @classmethod
    def load(cls, plan: ReplicaPlan) -> Self:
        """Load the model of `plan` onto its devices; takes seconds to minutes.

        Raises:
            ModelLoadFailed: With the model, the cause and a fix.
        """
        pipe = load_pipeline(plan)
        settings = plan.stage.engine_args.pipeline
        args = plan.stage.engine_args
        defaults = find_defaults(pipe, args.model, plan.stage.default_sampling_params)
        abilities = replace(
            inspect_abilities(pipe, defaults.values),
            known_as=defaults.known_as,
            default_sources=defaults.sources,
        )
        chunk = DeviceChunk.open(pipe, plan)
        try:
            finish_settings(pipe, settings)
            engine = cls(pipe, abilities, settings, plan.stage.engine_args.max_num_seqs)
        except BaseException:
            chunk.close()
            raise
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

        The default size comes first, then those of `warmup_shapes`. Further tasks of the same parts
        that fail are not offered.

        Raises:
            GenerationError: When the model cannot make it; the replica must not become ready.
        """
        # A cache shows only late in a run whether it fits the family.
        requests = WarmUpRequests(
            self.abilities, self._warmup_shapes, steps=100 if self._runs.step_cache.on else None
        )
        for parameters, inputs in requests.of_each_size():
            self.generate(parameters, SilentProgress(), inputs)
        self.abilities = replace(self.abilities, preview=self._runs.preview.ready)
        # A cache keeps requests apart anyway.
        if self._max_num_seqs > 1 and not self._runs.step_cache.on:
            self._runs.batched_tasks = [
                task
                for task in self._runs.tasks_for_batches
                if self._is_right_in_batch(requests.in_batch(task))
            ]

    def _offer_no_more(self, task: str, failure: GenerationFailed) -> None:
        """Take away a further task of the parts that the warm-up showed they cannot do."""
        logger.warning("%s is not offered: %s", task, failure)
        tasks = tuple(each for each in self.abilities.tasks if each != task)
        self.abilities = replace(self.abilities, tasks=tasks)

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

    def _is_right_in_batch(self, parameters: Parameters) -> bool:
        try:
            return is_right_in_batch(
                parameters,
                str(getattr(self._pipe, "dtype", "")).removeprefix("torch."),
                lambda asked, inputs: self.generate(asked, SilentProgress(), inputs),
                self._runs.serve_at_once,
            )
        except GenerationFailed as failure:
            if parameters.task == self.abilities.tasks[0]:
                raise
            self._offer_no_more(parameters.task, failure)
            return False

    def generate(
        self, parameters: Parameters, progress: Progress, inputs: Inputs | None = None
    ) -> Generation:
        """Make the outputs of one request, whose parameters fit the abilities; thread-safe.

        `inputs` are the decoded images that the parameters name. Those whose pixels a task starts
        from are cut to the size of the output; editing models get them as they are.

        Output k is made with a generator of its own, on the CPU, seeded with `seed + k`. Alone it
        makes the same bytes each time; beside others it shares denoiser calls, which rounds
        differently in the last places, unless it is `deterministic`.

        Raises:
            Interrupted: When `progress` raised it; the engine is as before the call.
            OutOfMemory: The memory of the run is free again.
            NonFiniteOutput: NaN or infinity came instead of an output, in float32 too.
            LoraLoadFailed: An adapter cannot be read or does not fit; the others are as before.
            DeviceLost: No run of this process can succeed any more, whoever is to blame.
            GenerationFailed: Anything else the pipeline raised; the log has its traceback.
        """
        try:
            with self._one_at_a_time:
                return self._finite_runs.serve(
                    parameters, progress, inputs or Inputs(), self._chunk
                )
        except ServingError:
            raise
        except Exception as error:
            failure = run_failure(error, parameters, self._pipe._execution_device.type)
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
