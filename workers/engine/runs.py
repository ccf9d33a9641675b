"""Runs of one pipeline: each on a copy of it, for one request or for a batch of them.

Requests that wait for their turn to begin and are of one batch (``workers.engine.batch``) start
as one pipeline call. Each is told of its steps, may leave and may fail by itself; where a batch
fails as a whole, each of its requests runs by itself. Knows no dtypes, no devices and no Redis.
"""

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch
from PIL import Image

from configs.parameters import Abilities
from configs.stage_config import PipelineSettings
from workers.devices.chunk import denoisers
from workers.engine.batch import Slot, Turns
from workers.engine.features.adapters import Adapters
from workers.engine.features.preview import Preview
from workers.engine.features.prompt_cache import PromptCache
from workers.engine.features.step_cache import StepCache
from workers.engine.generation import (
    Generation,
    Video,
    frames_in,
    images_in,
    output_of,
    output_warnings,
    to_images,
    to_videos,
)
from workers.engine.loader import free_parts
from workers.engine.pipelines import PipelineCopies
from workers.engine.run import Decoder, DenoisingRun
from workers.engine.schedulers import calls_of
from workers.failures import short_cause
from workers.families import DEFAULT_FPS
from workers.patches import note_places, note_signatures
from workers.sharing.call import Member
from workers.sharing.denoisers import forget_state, has_stateful_hooks
from workers.sharing.rendezvous import Rendezvous

_logger = logging.getLogger(__name__)


class PipelineRuns:
    """Runs requests, from any number of threads.

    Attributes:
        batched_tasks: Tasks whose requests may start together.
        rendezvous: Where their loops meet.
        turns: For what they share outside their loops.
        preview: Learns from their outputs how latents look.
        step_cache: Of the denoisers.
    """

    def __init__(self, pipe: Any, abilities: Abilities, settings: PipelineSettings) -> None:
        """Run copies of `pipe`.

        Raises:
            ModelLoadFailed: The pipeline takes no adapters, or has no cache of the kind set.
        """
        self.adapters = Adapters(pipe, settings)
        self.prompts = PromptCache(
            settings.prompt_embed_cache_bytes if settings.enable_prompt_embed_cache else 0
        )
        self.step_cache = StepCache(pipe, settings)
        self.batched_tasks: Collection[str] = ()
        self.turns = Turns()
        self.preview = Preview(abilities.size_multiple)
        self._decoder = Decoder(getattr(pipe, "vae", None))
        self._default_fps = abilities.default_fps or DEFAULT_FPS
        self._current = threading.local()
        self._denoisers = list(denoisers(pipe).values())
        # Once, for looking through all modules takes longer than a request should.
        self._parts = [part for denoiser in self._denoisers for part in denoiser.modules()]
        self.rendezvous = Rendezvous(self._denoisers)
        self.rendezvous.switch = self.adapters.set_denoisers
        compiled = settings.diffusion_compile_granularity != "none"  # such code asks nothing
        for denoiser in self._denoisers:
            denoiser.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            if not compiled:
                note_signatures(denoiser)
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module) and not (compiled and part in self._denoisers):
                note_places(part)
        # After the rendezvous, since pipelines of other tasks may copy the denoiser as it is.
        self._copies = PipelineCopies(pipe, abilities)

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the adapters that requests may ask for."""
        return self.adapters.names

    @property
    def tasks_for_batches(self) -> list[str]:
        """Tasks whose requests might start together, were that found right."""
        return self._copies.tasks_for_batches

    def serve(self, slot: Slot) -> Generation:
        """Run a request to its end, with those that wait as it does; raises what ends it."""
        if has_stateful_hooks(self._parts):
            return self._serve_exclusively(slot)
        if slot.parameters.task in self.batched_tasks:
            slot.batch_key = self._copies.batch(slot)
        while True:
            pipe = self._copy_for(slot)
            batch = self.turns.begin(slot)
            if len(batch) == 1:
                return self._run(pipe, batch)[0]
            if batch:
                self._start_batch(pipe, batch)
            generation = slot.result()
            if generation is not None:
                return generation
            slot = slot.anew()

    def serve_at_once(self, slots: Sequence[Slot]) -> list[Generation]:
        """Run requests of one batch, in this thread."""
        pipe = self._copy_for(slots[0])
        self.turns.take(lambda: None)
        return self._run(pipe, slots)

    def _serve_exclusively(self, slot: Slot) -> Generation:
        """Run a request while no other does, for the denoiser keeps state between its calls."""
        pipe = self._copy_for(slot)
        self.turns.begin(slot)
        return self._run(pipe, [slot], exclusive=True)[0]

    def _copy_for(self, slot: Slot) -> Any:
        pipe = self._copies.copy_for(slot.parameters, slot.inputs)
        self.prompts.watch(pipe, lambda: self.adapters.text_state(slot.parameters.lora))
        return pipe

    def _start_batch(self, pipe: Any, batch: Sequence[Slot]) -> None:
        """Run a batch in a thread of its own, which no request's end ends."""
        # The process waits for it: a thread that is cut off inside torch aborts the process.
        thread = threading.Thread(
            target=self._run_batch, args=(pipe, batch), name="batch", daemon=False
        )
        try:
            thread.start()
        except RuntimeError as error:  # the host has no thread left
            _logger.warning("no thread for requests that start together: %s", error)
            self.turns.pass_on()
            for slot in batch:
                slot.run_by_itself()

    def _run_batch(self, pipe: Any, batch: Sequence[Slot]) -> None:
        failure = None
        try:
            self._run(pipe, batch)
        except BaseException as error:  # noqa: BLE001 - whose it is shows when each runs by itself
            failure = short_cause(error)
        if failure is not None and not all(slot.ended for slot in batch):
            _logger.warning(
                "%d requests that started together failed, each runs by itself: %s",
                len(batch),
                failure,
            )
            torch.cuda.empty_cache()
        for slot in batch:
            slot.run_by_itself()

    def _run(
        self, pipe: Any, slots: Sequence[Slot], *, exclusive: bool = False
    ) -> list[Generation]:
        """Run a pipeline copy for those whose turn it is; each that stays gets its end."""
        asked = slots[0].parameters
        with self.rendezvous.member(
            alone=exclusive or asked.deterministic,
            key=asked.lora or None,
            outputs=[slot.outputs for slot in slots],
        ) as member:
            run = DenoisingRun(pipe, slots, self.turns, member, self._decoder, self.preview)
            run.keeps_turn = exclusive
            self._current.run = run
            try:
                with torch.inference_mode(), run:
                    run.tell()
                    for slot in slots:
                        slot.warnings += self._copies.prompt_warnings(slot.parameters)
                    output = self._call(pipe, slots, run)
            finally:
                del self._current.run
        if len(slots) == 1:
            return [self._generation(slots[0], output, run, member)]
        rows = run.output_rows
        return [
            self._generation(slot, output_of(output, rows.of(slot), rows.total), run, member)
            for slot in run.kept
        ]

    def _call(self, pipe: Any, slots: Sequence[Slot], run: DenoisingRun) -> Any:
        asked = slots[0].parameters
        self.step_cache.begin(pipe, calls_of(pipe.scheduler, asked.num_inference_steps))
        try:
            with self.adapters.ready(asked.lora, self.rendezvous.held):
                arguments = self._copies.arguments(slots)
                drawn = arguments["generator"]
                run.generators = drawn if isinstance(drawn, list) else [drawn]
                return pipe(**run.guidance.watched(arguments, type(pipe)))
        finally:
            self.step_cache.reset()
            if run.keeps_turn:
                forget_state(self._denoisers)
            free_parts(pipe)

    def _generation(self, slot: Slot, output: Any, run: DenoisingRun, member: Member) -> Generation:
        parameters = slot.parameters
        images: tuple[Image.Image, ...] = ()
        videos: tuple[Video, ...] = ()
        if parameters.makes_video:
            videos = to_videos(frames_in(output), parameters.fps or self._default_fps)
        else:
            images = to_images(images_in(output))
        latents = run.latents_of(slot)
        if latents is not None:
            self.preview.learn(latents, images[0] if images else _first_frame(videos[0]))
        encode_s, denoise_s, decode_s = run.timings(slot)
        generation = Generation(
            images=images,
            videos=videos,
            seeds=parameters.seeds(),
            scheduler=run.scheduler,
            steps=run.step,
            encode_s=encode_s,
            denoise_s=denoise_s,
            decode_s=decode_s,
            batch_mean=member.batch_mean,
            warnings=(*slot.warnings, *output_warnings(output, images or videos, parameters)),
        )
        slot.end(generation)
        return generation

    def _before_forward(
        self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        run: DenoisingRun | None = getattr(self._current, "run", None)
        if run is None:
            return None
        run.before_forward()
        steered = run.guidance.steered_call(denoiser, kwargs)
        return None if steered is None else (args, steered)


def _first_frame(video: Video) -> Image.Image:
    return Image.fromarray(video.frames[0])
