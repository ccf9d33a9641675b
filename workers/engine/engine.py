"""The engine of one replica: a loaded pipeline that turns parameters into images or videos.

With `max_num_seqs` above 1, requests run at once and share denoiser calls; otherwise nothing of
that is built.
"""

import gc
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch

from configs.errors import (
    GenerationFailed,
    LoraLoadFailed,
    OutOfMemory,
    ServingError,
)
from configs.parameters import Abilities, Parameters
from configs.stage_config import PipelineSettings, ReplicaPlan
from workers.devices.chunk import DeviceChunk, denoisers
from workers.devices.weights import DENOISERS
from workers.engine.abilities import inspect_abilities, refuse_unfit_defaults
from workers.engine.arguments import Inputs
from workers.engine.concurrent import ConcurrentRuns, Turns
from workers.engine.features import FEATURES
from workers.engine.generation import Generation
from workers.engine.known_settings import find_defaults
from workers.engine.loader import load
from workers.engine.loading.download import Tell, untold
from workers.engine.loading.dtypes import part_dtypes
from workers.engine.loading.scheduler import set_scheduler
from workers.engine.loading.settings import finish_settings
from workers.engine.progress import Progress, SilentProgress
from workers.engine.run import Parts, Runs, Serve, Slot
from workers.engine.warm_up import WarmUpRequests, is_right_in_batch
from workers.failures import run_failure, short_cause
from workers.patches import execution_device, note_places, note_signatures
from workers.sharing.rendezvous import Rendezvous

__all__ = ["Engine", "Generation"]

logger = logging.getLogger(__name__)


class Engine:
    """One pipeline on one device chunk; make it with :meth:`load`.

    Attributes:
        pipe: The pipeline, which nobody else may call or change while requests run.
        abilities: What requests may ask for.
        chunk: The devices that work for it.
        features: Those that are on.
        request_coming: Returns a context to say that this thread may be about to call
            :meth:`generate`, within milliseconds. Those that come at once start together, and a
            lone request needs to wait for nobody.
    """

    def __init__(
        self,
        pipe: Any,
        abilities: Abilities,
        settings: PipelineSettings | None = None,
        max_num_seqs: int = 1,
        chunk: DeviceChunk | None = None,
    ) -> None:
        """Serve `pipe`, which the engine owns from here on and which has its settings already.

        It serves up to `max_num_seqs` requests at once. The devices of `chunk` work for it already.

        Raises:
            ModelLoadFailed: The pipeline supports no adapters, or has no cache of the kind set.
        """
        settings = settings or PipelineSettings()
        self.pipe = pipe
        self.chunk = chunk or DeviceChunk()
        self._warmup_shapes = settings.warmup_shapes
        several = max_num_seqs > 1 and not settings.one_at_a_time
        self._one_at_a_time: AbstractContextManager[Any] = (
            nullcontext() if several else threading.Lock()
        )
        # First, since whatever looks at a denoiser's `forward` has to find the one that stays.
        self._rendezvous = Rendezvous(denoisers(pipe).values()) if several else None
        parts = Parts(pipe, abilities, settings, self.chunk, self._rendezvous)
        found = [feature_of(parts) for feature_of in FEATURES]
        self.features = tuple(feature for feature in found if feature is not None)
        _note_what_stays(pipe, settings)
        runs = Runs(pipe, abilities, self.features)
        self._decoder = runs.decoder
        self._concurrent: ConcurrentRuns | None = None
        self._serve: Serve = runs.serve
        self.request_coming: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._rendezvous is not None:
            self._concurrent = ConcurrentRuns(pipe, runs, self._rendezvous)
            self._serve = self._concurrent.serve
            self.request_coming = self._concurrent.turns.coming
        for feature in reversed(self.features):
            self._serve = feature.around_request(self._serve)
        self.abilities = self._with_offers(abilities)

    @classmethod
    def load(cls, plan: ReplicaPlan, tell: Tell = untold) -> Self:
        """Load the model of `plan` onto its devices; takes seconds to minutes.

        `tell` learns what is done meanwhile, with the bytes of a download.

        Raises:
            ModelLoadFailed: With the model, the cause and a fix.
        """
        loaded = load(plan, tell)
        pipe, plan = loaded.pipe, loaded.plan
        args = plan.stage.engine_args
        settings, staged = args.pipeline, plan.stage.default_sampling_params
        with ExitStack() as undo:
            if loaded.ranks is not None:
                undo.callback(loaded.ranks.close)
            defaults = find_defaults(pipe, args.model, staged)
            scheduler = set_scheduler(pipe, args, defaults.shift)
            defaults = scheduler.with_steps(defaults, staged)
            abilities = replace(
                inspect_abilities(pipe, defaults.values),
                scheduler_settings=scheduler.settings,
                known_as=defaults.known_as,
                default_sources=defaults.sources,
                dtypes=part_dtypes(pipe),
                dtype_sources=loaded.dtypes.sources,
            )
            chunk = DeviceChunk.open(pipe, plan, loaded.ranks)
            undo.callback(chunk.close)
            finish_settings(pipe, settings)
            engine = cls(pipe, abilities, settings, args.max_num_seqs, chunk)
            refuse_unfit_defaults(engine.abilities, staged)
            undo.pop_all()
        return engine

    def watch_devices(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason, in a thread, once no run can succeed any more.

        That is when a rank has ended; what a run meets itself is raised as :class:`DeviceLost`.
        """
        self.chunk.watch(on_lost)

    def close(self) -> None:
        """End what works for the engine outside of its runs; it must have none any more."""
        self.chunk.close()

    def warm_up(self, tell: Tell = untold) -> None:
        """Make one output of each warm-up size in two steps, so that no client gets the slow run.

        The default size comes first, then those of `warmup_shapes`. Further tasks of the same parts
        that fail are not offered.

        Raises:
            GenerationError: When the model cannot make it; the replica must not become ready.
        """
        # What a feature keeps between steps shows only late in a run whether it fits the family.
        stateful = any(feature.stateful for feature in self.features)
        requests = WarmUpRequests(
            self.abilities, self._warmup_shapes, steps=100 if stateful else None
        )
        self._decoder.measuring = True
        for parameters, inputs in requests.of_each_size():
            frames = f"x{parameters.num_frames}" if parameters.num_frames else ""
            tell(f"warming up {parameters.width}x{parameters.height}{frames}")
            self.generate(parameters, SilentProgress(), inputs)
        self._decoder.measuring = False
        if self._rendezvous is not None:
            self._rendezvous.reserve(self._decoder.peak_bytes)
        self.abilities = self._with_offers(self.abilities)
        if self._concurrent is not None:
            self._concurrent.batched_tasks = [
                task
                for task in self._concurrent.tasks_for_batches
                if self._is_right_in_batch(self._concurrent, requests.in_batch(task))
            ]

    def _with_offers(self, abilities: Abilities) -> Abilities:
        for feature in self.features:
            abilities = feature.offers(abilities)
        return abilities

    def _offer_no_more(self, task: str, failure: GenerationFailed) -> None:
        """Take away a further task of the parts that the warm-up showed they cannot do."""
        logger.warning("%s is not offered: %s", task, failure)
        tasks = tuple(each for each in self.abilities.tasks if each != task)
        self.abilities = replace(self.abilities, tasks=tasks)

    @property
    def batched_tasks(self) -> list[str]:
        """Tasks whose requests may start together, which the warm-up found out."""
        return [] if self._concurrent is None else list(self._concurrent.batched_tasks)

    @property
    def turns(self) -> Turns:
        """For what runs at once share outside their loops."""
        assert self._concurrent is not None, "one request runs at a time"
        return self._concurrent.turns

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the denoising loops of runs at once meet."""
        assert self._rendezvous is not None, "one request runs at a time"
        return self._rendezvous

    @property
    def requests_waiting(self) -> int:
        """Requests and runs that wait for their turn to encode or decode."""
        return 0 if self._concurrent is None else self._concurrent.turns.waiting

    def _is_right_in_batch(self, concurrent: ConcurrentRuns, parameters: Parameters) -> bool:
        types = part_dtypes(self.pipe)
        try:
            return is_right_in_batch(
                parameters,
                next((dtype for name in DENOISERS if (dtype := types.get(name))), ""),
                lambda asked, inputs: self.generate(asked, SilentProgress(), inputs),
                concurrent.serve_at_once,
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
        if parameters.lora and not self.abilities.loras:
            name = parameters.lora[0].name
            raise LoraLoadFailed(f"lora: there is no adapter {name!r}; this stage has none")
        try:
            with self._one_at_a_time:
                return self._serve(Slot(parameters, progress, inputs or Inputs()))
        except ServingError:
            raise
        except Exception as error:
            failure = run_failure(error, parameters, execution_device(self.pipe).type)
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
        if execution_device(self.pipe).type != "cuda":
            return None
        return sum(
            torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count())
        )


def _note_what_stays(pipe: Any, settings: PipelineSettings) -> None:
    compiled = settings.diffusion_compile_granularity != "none"  # such code asks nothing
    found = list(denoisers(pipe).values())
    if not compiled:
        for denoiser in found:
            note_signatures(denoiser)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module) and not (compiled and part in found):
            note_places(part)
