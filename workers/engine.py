"""The engine of one replica: a loaded pipeline that turns parameters into images or videos.

`generate` may be called from many threads at once: each call runs a shallow copy of the pipeline,
which shares the weights and has its own noise scheduler; inside their loops they meet at the
rendezvous and share denoiser calls. Knows no Redis, no Celery, no HTTP and no file format.
"""

import copy
import gc
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self

import diffusers
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
from workers.adapters import Adapters
from workers.denoising_run import DenoisingRun
from workers.device_chunk import DeviceChunk, denoisers
from workers.device_faults import is_device_lost
from workers.failure_cause import is_out_of_memory, short_cause
from workers.finite import watch_decoder
from workers.generation import Generation, Video, output_warnings, to_images, to_videos
from workers.inputs import Inputs
from workers.observer import Observer, SilentObserver
from workers.pipeline_arguments import arguments_of, call_arguments, left_out
from workers.pipeline_loader import load_pipeline
from workers.pipeline_settings import finish_settings, free_parts
from workers.pipeline_tasks import task_pipelines
from workers.precision import Precision
from workers.preview import Preview
from workers.prompt_cache import PromptCache
from workers.prompt_limit import cut_warnings, prompt_limits
from workers.rendezvous import Rendezvous
from workers.step_cache import StepCache
from workers.video_rules import DEFAULT_FPS

__all__ = ["Engine", "Generation"]

logger = logging.getLogger(__name__)

_FLOAT32 = "made in float32, because in the dtype of the model NaN or infinity came of it"


class Engine:
    """One pipeline on one device chunk; make it with :meth:`load`."""

    def __init__(
        self, pipe: Any, abilities: Abilities, settings: PipelineSettings | None = None
    ) -> None:
        """Serve `pipe`, which the engine owns from here on and which has its settings already.

        Raises:
            ModelLoadFailed: The pipeline takes no adapters, or has no cache of the kind set.
        """
        settings = settings or PipelineSettings()
        self._adapters = Adapters(pipe, settings)
        self._prompts = PromptCache(
            settings.prompt_embed_cache_bytes if settings.enable_prompt_embed_cache else 0
        )
        self.abilities = replace(abilities, loras=self._adapters.names)
        self._warmup_shapes = settings.warmup_shapes
        self._one_at_a_time: AbstractContextManager[Any] = (
            threading.Lock() if settings.one_at_a_time else nullcontext()
        )
        self._step_cache = StepCache(pipe, settings)
        self._pipe = pipe
        self._chunk = DeviceChunk()
        self._limits = prompt_limits(pipe)
        self._preview = Preview(abilities.size_multiple)
        self._turn = threading.Lock()
        self._current = threading.local()
        self._precision = Precision(pipe)
        watch_decoder(getattr(pipe, "vae", None))
        self._vae_dtype = getattr(getattr(pipe, "vae", None), "dtype", None)
        self.rendezvous = Rendezvous(denoisers(pipe).values())
        self.rendezvous.switch = self._adapters.set_denoisers
        for denoiser in denoisers(pipe).values():
            denoiser.register_forward_pre_hook(self._before_forward)
        self._pipes = task_pipelines(pipe)

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
        engine = cls(pipe, abilities, settings)
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
        self.abilities = replace(self.abilities, preview=self._preview.ready)

    def _warm_up(self, shape: WarmupShape) -> None:
        abilities = self.abilities
        multiple = abilities.size_multiple
        if shape.width % multiple or shape.height % multiple:
            raise ModelLoadFailed(
                f"engine_args.warmup_shapes: {shape.width}x{shape.height} is not a multiple of "
                f"{multiple}, as {type(self._pipe).__name__} needs it"
            )
        task, frames = abilities.tasks[0], abilities.default_frames
        parameters = Parameters(
            prompt="warm-up",
            seed=0,
            task=task,
            width=shape.width,
            height=shape.height,
            # A cache shows only late in a run whether it fits the family.
            num_inference_steps=min(abilities.default_steps, 100 if self._step_cache.on else 2),
            guidance_scale=abilities.default_guidance_scale if abilities.guidance_scale else None,
            num_frames=frames and (shape.num_frames or frames),
            fps=abilities.default_fps,
        )
        size = (parameters.width, parameters.height)
        inputs = Inputs(
            images=(Image.new("RGB", size, "gray"),) if task in FROM_IMAGE_TASKS else (),
            mask=Image.new("L", size, "white") if task == INPAINT else None,
        )
        self.generate(parameters, SilentObserver(), inputs)

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
                return self._generate(parameters, observer, inputs)
        except NonFiniteOutput as error:
            if not (self._chunk.holds_all_weights and self._precision.can_rise):
                raise
            first = str(error)
        logger.warning("%s; once more in float32", first)
        try:
            with self._precision.raised(tell):
                made = self._generate(parameters, observer, inputs)
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

    def _generate(self, parameters: Parameters, observer: Observer, inputs: Inputs) -> Generation:
        pipe = self._copy_with_scheduler(self._pipe_for(parameters, inputs), parameters.scheduler)
        arguments = call_arguments(parameters, type(pipe), inputs)
        self._prompts.watch(pipe, lambda: self._adapters.text_state(parameters.lora))
        key = parameters.lora or None
        with self.rendezvous.member(alone=parameters.deterministic, key=key) as member:
            latents: list[torch.Tensor] = []

            def show(step: int, sample: torch.Tensor) -> None:
                latents[:] = [sample]
                self._show(step, sample, parameters, observer)

            run = DenoisingRun(
                pipe, observer, parameters.num_inference_steps, self._turn, member.leave, show
            )
            self._current.run = run
            try:
                with torch.inference_mode(), run:
                    run.tell()
                    run.warnings += self._prompt_warnings(parameters)
                    self._step_cache.begin(pipe, parameters.num_inference_steps)
                    try:
                        with self._adapters.ready(parameters.lora, self.rendezvous.held):
                            output = pipe(**arguments)
                    finally:
                        self._restore_vae(run)
                        self._step_cache.reset()
                        free_parts(pipe)
            finally:
                del self._current.run
        images: tuple[Image.Image, ...] = ()
        videos: tuple[Video, ...] = ()
        if parameters.makes_video:
            fps = parameters.fps or self.abilities.default_fps or DEFAULT_FPS
            videos = to_videos(output.frames, fps)
        else:
            images = to_images(output.images)
        if latents:
            self._preview.learn(
                latents[0], images[0] if images else Image.fromarray(videos[0].frames[0])
            )
        encode_s, denoise_s, decode_s = run.timings
        return Generation(
            images=images,
            videos=videos,
            seeds=parameters.seeds(),
            scheduler=type(pipe.scheduler).__name__,
            steps=run.step,
            encode_s=encode_s,
            denoise_s=denoise_s,
            decode_s=decode_s,
            batch_mean=member.batch_mean,
            warnings=(*run.warnings, *output_warnings(output, images or videos, parameters)),
        )

    def _pipe_for(self, parameters: Parameters, inputs: Inputs) -> Any:
        task = parameters.task
        if task not in self._pipes:
            raise GenerationFailed(f"task: {task} is none of {', '.join(self._pipes)}")
        if task in FROM_IMAGE_TASKS and not inputs.images:
            raise GenerationFailed(f"image: {task} needs one")
        if task == INPAINT and inputs.mask is None:
            raise GenerationFailed(f"mask_image: {task} needs one")
        return self._pipes[task]

    def _show(
        self, step: int, sample: torch.Tensor, parameters: Parameters, observer: Observer
    ) -> None:
        if observer.wants_preview():
            picture = self._preview.render(sample, parameters.width, parameters.height)
            if picture is not None:
                observer.on_preview(step, picture)

    def _copy_with_scheduler(self, pipe: Any, name: str | None) -> Any:
        own = self._pipe.scheduler
        if name is None or name == type(own).__name__:
            scheduler = copy.deepcopy(own)
        elif name in self.abilities.schedulers:
            scheduler = getattr(diffusers, name).from_config(own.config)
        else:
            fitting = ", ".join(self.abilities.schedulers)
            raise GenerationFailed(f"scheduler: {name} does not fit the model; {fitting} do")
        pipe = copy.copy(pipe)
        # Not by setattr, which would register the scheduler in the configuration.
        pipe.__dict__["scheduler"] = scheduler
        # What it does for one pipeline alone would be done to all that share the parts.
        pipe.__dict__["maybe_free_model_hooks"] = _nothing
        return pipe

    def _prompt_warnings(self, parameters: Parameters) -> list[str]:
        pipeline_class = type(self._pipes[parameters.task])
        warnings = [
            f"{name}: {pipeline_class.__name__} takes none; it was left out"
            for name in left_out(parameters, pipeline_class)
        ]
        for name in ("prompt", "negative_prompt"):
            if name in arguments_of(pipeline_class):
                warnings += cut_warnings(self._limits, name, getattr(parameters, name))
        return warnings

    def _before_forward(self, *_: object) -> None:
        run: DenoisingRun | None = getattr(self._current, "run", None)
        if run is not None:
            run.before_forward()

    def _restore_vae(self, run: DenoisingRun) -> None:
        """Undo a pipeline's own upcast (SDXL in float16) that an error left in place."""
        vae = getattr(self._pipe, "vae", None)
        if run.holds_turn and vae is not None and vae.dtype != self._vae_dtype:
            vae.to(dtype=self._vae_dtype)


def _nothing() -> None:
    pass


def _as_failure(error: Exception, parameters: Parameters, device: str) -> GenerationError:
    if is_device_lost(error, device):
        return DeviceLost(f"the device answers no more: {short_cause(error)}")
    if is_out_of_memory(error):
        size = f"{parameters.num_outputs_per_prompt} x {parameters.width}x{parameters.height}"
        if parameters.num_frames is not None:
            size += f" with {parameters.num_frames} frames"
        return OutOfMemory(f"too little memory for {size}; ask for a smaller size or fewer outputs")
    return GenerationFailed(f"the pipeline failed: {short_cause(error)}")
