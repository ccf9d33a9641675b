"""The run of one request: encode, denoise, decode.

A pipeline does all three in one call. Its first call of the denoiser ends the encoding, the step of
its noise scheduler is where the run is watched and stopped, and its last step ends the denoising.
What else may be done hangs on the hooks of :class:`Feature`.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from PIL import Image

from configs.parameters import Abilities, Parameters
from configs.stage_config import PipelineSettings
from workers.devices.chunk import DeviceChunk, denoisers
from workers.engine.arguments import Inputs, call_arguments
from workers.engine.decoder import Decoder
from workers.engine.generation import (
    Generation,
    Video,
    frames_in,
    images_in,
    output_warnings,
    refuse_non_finite,
    to_images,
    to_videos,
    watch_decoder,
)
from workers.engine.pipelines import PipelineCopies
from workers.engine.progress import Progress
from workers.engine.schedulers import step_arguments
from workers.engine.steps import Pace, WatchedStep, steps_from
from workers.families import DEFAULT_FPS
from workers.patches import counted_steps, free_parts, patched
from workers.sharing.cost import mark
from workers.sharing.rendezvous import Rendezvous


@dataclass(eq=False)
class Slot:
    """A request in a run.

    Attributes:
        parameters: What it asks for.
        progress: Is told of its steps, and may end or change it.
        inputs: Its images.
        in_float32: Whether the weights are held in float32 for it.
        arrived: When, on the clock of `time.perf_counter`.
        steer_from: Step before which changes of its guidance do not count, since it has run that
            far without them.
        warnings: Sentences for the client.
    """

    parameters: Parameters
    progress: Progress
    inputs: Inputs
    in_float32: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    steer_from: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether it is over while the run goes on for others."""
        return False

    def run_by_itself(self) -> None:
        """Send it away from others that started with it, to begin anew."""


Serve = Callable[[Slot], Generation]


@dataclass(frozen=True)
class Parts:
    """What features are made of.

    Attributes:
        pipe: The pipeline, whose denoisers and encoders all runs share.
        rendezvous: Where runs share denoiser calls; None where there is one run at a time.
    """

    pipe: Any
    abilities: Abilities
    settings: PipelineSettings
    chunk: DeviceChunk
    rendezvous: Rendezvous | None


class Feature:
    """Something that is done beside runs. A hook that a feature does not override is not called.

    Attributes:
        stateful: Whether it keeps something on the denoisers from one step to the next.
        asked_by: Parameter without which a request asks nothing of `attach`; None: all ask it.
    """

    stateful = False
    asked_by: ClassVar[str | None] = None

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """Return the feature for an engine; None where it is off."""
        raise NotImplementedError

    def has(self, hook: str) -> bool:
        return any(hook in vars(kind) for kind in type(self).__mro__[:-2])

    def offers(self, abilities: Abilities) -> Abilities:
        """Return the abilities with what it makes possible; asked at load and after the warm-up."""
        return abilities

    def around_request(self, serve: Serve) -> Serve:
        """Return what serves a request in place of `serve`."""
        return serve

    def attach(self, run: "Run") -> None:
        """Change a run, its pipeline or its arguments, right before the pipeline is called."""

    def around_call(self, run: "Run") -> AbstractContextManager[Any]:
        """Return what is entered before the pipeline is called, and left at its end."""
        raise NotImplementedError

    def steer(self, run: "Run", slot: Slot, wanted: Mapping[str, float | None]) -> None:
        """Change the guidance of a request that goes on; called between steps once it is edited."""

    def show(self, run: "Run", slot: Slot) -> None:
        """Show a request that wants to see it how it looks; called after a step."""

    def after_call(self, run: "Run", slot: Slot, output: Image.Image) -> None:
        """Learn from the first output of a request that is done."""


class Runs:
    """What the runs of one pipeline share.

    Attributes:
        pipelines: Makes the copy of the pipeline for each run.
        decoder: Decodes for one of them at a time.
        decoder_watched: Whether what it makes is looked at for NaN.
        current: The run of each thread, as `run`.
    """

    def __init__(self, pipe: Any, abilities: Abilities, features: Sequence[Feature]) -> None:
        """Run copies of `pipe`, whose `forward` of the denoisers is what it will stay."""

        def hooks(name: str) -> list[Callable[..., Any]]:
            return [getattr(each, name) for each in features if each.has(name)]

        self.attach = [(each.asked_by, each.attach) for each in features if each.has("attach")]
        self.around_call = hooks("around_call")
        self.steer, self.show, self.after_call = hooks("steer"), hooks("show"), hooks("after_call")
        self.current = threading.local()
        self.default_fps = abilities.default_fps or DEFAULT_FPS
        self.offloads = bool(getattr(pipe, "_all_hooks", ()))
        vae = getattr(pipe, "vae", None)
        self.decoder = Decoder(vae, self._on_tiles)
        self.decoder_watched = watch_decoder(vae, self._after_decode)
        self.pipelines = PipelineCopies(pipe, abilities, frames_as_bytes=self.decoder_watched)
        for denoiser in denoisers(pipe).values():
            denoiser.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def serve(self, slot: Slot) -> Generation:
        """Run one request while no other runs."""
        pipe = self.pipelines.copy_for(slot.parameters, slot.inputs)
        run = Run(self, [slot], pipe)
        return run.generation(slot, run.call())

    def _after_decode(self, finite: torch.Tensor) -> None:
        run: Run | None = getattr(self.current, "run", None)
        if run is not None:
            run.decoded_finite.append(finite)

    def _on_tiles(self) -> None:
        run: Run | None = getattr(self.current, "run", None)
        for slot in () if run is None else run.slots:
            slot.warnings.append(
                "it was decoded in tiles, because the memory was too small; seams may show"
            )

    def _before_forward(
        self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        run: Run | None = getattr(self.current, "run", None)
        if run is None:
            return None
        if run.encoded_at is None:
            run.encoded()
        if not run.before_forward:
            return None
        for hook in run.before_forward:
            kwargs = hook(denoiser, kwargs)
        return args, kwargs


class Run:
    """One call of one pipeline copy, in one thread.

    Attributes:
        slots: The request that it is for; several where they started together.
        present: For each of them, whether it still wants its samples.
        pipe: The copy.
        arguments: Of its call; features may change them before it.
        steps: Denoising steps, in calls of the noise scheduler.
        step: Those done.
        latents: The sample after the last of them.
        decoded_finite: Whether what the decoder made is finite, piece by piece, on its device.
        encoded_at: When the first call of the denoiser began, as `time.perf_counter` says.
        holds_turn: Whether no other run encodes or decodes now.
        text_state: What the text encoders are set to.
        batch_mean: Mean number of requests that shared its denoiser calls.
        notes: What features keep of this run, each by itself.
        before_forward: Hooks of this run: each gets the denoiser and the named arguments of its
            call, and returns those to call it with.
        after_encode: Hooks of this run alone, called with it before the first step.
        at_step: The same, called before the first step and after each.
        after_denoise: The same, called after the last step.
    """

    def __init__(self, runs: Runs, slots: Sequence[Slot], pipe: Any) -> None:
        """Run `pipe`, whose scheduler must be its own."""
        self.slots = slots
        self.present = [True] * len(slots)
        self.pipe = pipe
        self.arguments: dict[str, Any] = {}
        self.step, self.steps = 0, slots[0].parameters.num_inference_steps
        self.latents: torch.Tensor | None = None
        self.decoded_finite: list[torch.Tensor] = []
        self.encoded_at: float | None = None
        self.holds_turn = True
        self.text_state: tuple[Any, ...] = (slots[0].in_float32,)
        self.batch_mean = 1.0
        self.notes: dict[Feature, Any] = {}
        self.before_forward: list[Callable[[Any, dict[str, Any]], dict[str, Any]]] = []
        self.after_encode: list[Callable[[Run], None]] = []
        self.at_step: list[Callable[[Run], None]] = []
        self.after_denoise: list[Callable[[Run], None]] = []
        self._runs = runs
        self._last_step: float | None = None
        self._pace = Pace()
        self._ended = 0.0

    def call(self) -> Any:
        """Encode, denoise and decode; return the output of the pipeline.

        Raises:
            Interrupted: The requests were ended.
            BaseException: Whatever else ends them.
        """
        runs, pipe = self._runs, self.pipe
        runs.current.run = self
        try:
            with torch.inference_mode(), ExitStack() as around:
                self.tell()
                for slot in self.slots:
                    slot.warnings += runs.pipelines.prompt_warnings(slot.parameters)
                self.arguments = self.make_arguments() | step_arguments(pipe)
                for hook in runs.around_call:
                    around.enter_context(hook(self))
                for name, attach in runs.attach:
                    if name is None or self.slots[0].parameters.asks(name):
                        attach(self)
                drawn = self.arguments["generator"]
                watched = WatchedStep(
                    pipe.scheduler,
                    self._after_step,
                    drawn if isinstance(drawn, list) else [drawn],
                    beside=self.tell,
                )
                # Only for the call: it closes a cycle that would keep a multistep scheduler's
                # tensors until the next garbage collection.
                around.enter_context(patched(pipe.scheduler, "step", watched))
                output = pipe(**self.arguments)
                if self.decoded_finite:  # read here, where the pixels have come and nobody waits
                    refuse_non_finite(torch.stack(self.decoded_finite), "the autoencoder")
            self._ended = time.perf_counter()
            self._steer()  # what was changed while it was decoded came too late
            return output
        except BaseException:
            if self.holds_turn:
                runs.decoder.undo_upcast()
            raise
        finally:
            del runs.current.run
            if self.holds_turn:
                runs.decoder.restore()
            if runs.offloads:
                free_parts(pipe)

    def make_arguments(self) -> dict[str, Any]:
        """Return the arguments of the pipeline's call."""
        slot = self.slots[0]
        return call_arguments(slot.parameters, type(self.pipe), slot.inputs)

    def tell(self) -> None:
        """Tell where the run is; raises what its `Progress` raises to end it."""
        self.slots[0].progress.on_step(self.step, self.steps)

    def encoded(self) -> None:
        """End the encoding: the first call of the denoiser is about to run."""
        self.encoded_at = time.perf_counter()
        # Pipelines that skip steps (image-to-image) mostly say here how many are left.
        self.steps = int(counted_steps(self.pipe) or len(self.pipe.scheduler.timesteps))
        for hook in self.after_encode:
            hook(self)
        self.at_boundary()

    def _after_step(self, result: Any, timestep: Any) -> Any:
        """Note a step of the scheduler, and end the denoising after the last; returns `result`."""
        sample = result[0]
        if sample.is_cuda:
            self._pace.keep(mark(sample.device))
        self._last_step = time.perf_counter()
        if self.encoded_at is None:  # a denoiser by another name
            self.encoded()
        if not self.step and not counted_steps(self.pipe):
            self.steps = steps_from(self.pipe.scheduler, timestep)
        self.step += 1
        self.steps = max(self.steps, self.step)
        self.latents = sample
        self.at_boundary()
        if self.step == self.steps:
            self.refuse_non_finite(sample)
            self._last_step = time.perf_counter()
            self.denoised()
        return result

    def denoised(self) -> None:
        """End the denoising: what comes is decoded."""
        for hook in self.after_denoise:
            hook(self)
        self.prepare_decoder(self._runs.decoder)

    def prepare_decoder(self, decoder: Decoder) -> None:
        """Get the autoencoder ready for what it is to decode."""
        asked = self.slots[0].parameters
        decoder.prepare(asked, asked.num_outputs_per_prompt)

    def at_boundary(self) -> None:
        """Between two steps, tell where the run is, and do what its requests want to be done."""
        self.tell()
        for hook in self.at_step:
            hook(self)
        self._steer()
        if self.step:
            for index, slot in enumerate(self.slots):
                if not slot.ended and self.present[index] and slot.progress.wants_preview():
                    for show in self._runs.show:
                        show(self, slot)

    def _steer(self) -> None:
        for index, slot in enumerate(self.slots):
            if self.present[index] and not slot.ended and self.step >= slot.steer_from:
                wanted = slot.progress.guidance()
                for hook in self._runs.steer if wanted else ():
                    hook(self, slot, wanted)

    def refuse_non_finite(self, sample: torch.Tensor) -> None:
        """Raise NonFiniteOutput unless all of the last sample are numbers."""
        refuse_non_finite(torch.isfinite(sample), "the denoiser")

    def rows_of(self, slot: Slot) -> slice:
        """Return which of the samples are those of a request."""
        del slot
        return slice(None)

    def latents_of(self, slot: Slot) -> torch.Tensor | None:
        """Return the samples of one request after the last step; None where they are not told."""
        del slot
        return self.latents

    def generation(self, slot: Slot, output: Any) -> Generation:
        """Return what a request made, of which `output` is the pipeline's output for it alone."""
        parameters = slot.parameters
        images, videos = tuple[Image.Image, ...](), tuple[Video, ...]()
        if parameters.makes_video:
            videos = to_videos(frames_in(output), parameters.fps or self._runs.default_fps)
        else:
            images = to_images(images_in(output), watched=self._runs.decoder_watched)
        for hook in self._runs.after_call:
            hook(self, slot, images[0] if images else Image.fromarray(videos[0].frames[0]))
        first = self._ended if self.encoded_at is None else self.encoded_at
        last = first if self._last_step is None else self._last_step
        return Generation(
            images=images,
            videos=videos,
            seeds=parameters.seeds(),
            scheduler=type(self.pipe.scheduler).__name__,
            steps=self.step,
            encode_s=first - slot.arrived,
            denoise_s=last - first,
            decode_s=self._ended - last,
            batch_mean=self.batch_mean,
            warnings=(*slot.warnings, *output_warnings(output, images or videos, parameters)),
        )
