"""The way through a pipeline: encode, denoise, decode.

It sees the way from two places that every diffusers family passes: the call of the denoiser and
`scheduler.step`. Step callbacks are not used, for some families take and ignore them (PixArt).
Outside the denoising loop runs take turns (``workers.engine.turns``); inside it they are free.
It knows nothing of families, parameters and outputs.
"""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from PIL import Image

from configs.errors import NonFiniteOutput
from workers.denoiser.member import Member
from workers.engine.decoder import Decoder
from workers.engine.finite import refuse_non_finite
from workers.engine.observer import Interrupted
from workers.engine.output_rows import OutputRows
from workers.engine.preview import Preview
from workers.engine.running_guidance import RunningGuidance
from workers.engine.seat import Seat
from workers.engine.turns import Turns
from workers.engine.watched_steps import steps_from, watch_steps


class DenoisingRun:
    """Watches one call of one pipeline copy for one request, or for several that started together.

    Used as a context around the call, in one thread, by a run whose turn it is.

    Attributes:
        steps: Denoising steps of this run, in calls of the scheduler.
        step: Those done.
        kept: The requests that stayed to the end, in their order.
        output_rows: Which rows of the output are whose.
        keeps_turn: Whether no other run may come between its first and its last forward.
        guidance: Of its requests.
        generators: Those that the pipeline was called with, one for each sample.
    """

    def __init__(
        self,
        pipe: Any,
        seats: Sequence[Seat],
        turns: Turns,
        member: Member,
        decoder: Decoder,
        preview: Preview,
    ) -> None:
        """Watch `pipe`, whose scheduler must be its own, for `seats` of one company."""
        self.steps = seats[0].parameters.num_inference_steps
        self.step = 0
        self.kept = list(seats)
        self.output_rows = OutputRows(seats)
        self.keeps_turn = False
        self.guidance = RunningGuidance(seats)
        self.generators: list[torch.Generator] = []
        self._pipe = pipe
        self._seats = seats
        self._rows = OutputRows(seats)
        self._turns = turns
        self._member = member
        self._decoder = decoder
        self._preview = preview
        self._latents: torch.Tensor | None = None
        self._holds_turn = True
        self._ended = time.perf_counter()
        self._first_forward: float | None = None
        self._last_step: float | None = None

    def __enter__(self) -> Self:
        watch_steps(
            self._pipe.scheduler, self._after_step, lambda: self.generators, beside=self.tell
        )
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._ended = time.perf_counter()
        if failure is None:  # what was changed while it was decoded came too late
            self.guidance.at_boundary(self.step, self._member.present, None, over=True)
        if self._holds_turn:
            self._decoder.restore()
        self._pass_turn()
        # The wrapped step closes a cycle that would keep a multistep scheduler's tensors until the
        # next garbage collection.
        self._pipe.scheduler.__dict__.pop("step", None)

    @property
    def scheduler(self) -> str:
        """Name of the noise scheduler."""
        return type(self._pipe.scheduler).__name__

    def timings(self, seat: Seat) -> tuple[float, float, float]:
        """Seconds until the first step, from there to the last, and after it; waits included."""
        first = self._ended if self._first_forward is None else self._first_forward
        last = first if self._last_step is None else self._last_step
        return first - seat.arrived, last - first, self._ended - last

    def tell(self) -> None:
        """Tell the observers where the run is; one that raises ends its request.

        Raises:
            BaseException: What the last observer raised, when none is left.
        """
        if len(self._seats) == 1:
            self._seats[0].tell(self.step, self.steps)
            return
        last_words: BaseException | None = None
        for index, seat in enumerate(self._seats):
            if self._member.present[index] and not seat.ended:
                try:
                    seat.tell(self.step, self.steps)
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    last_words = error
                    seat.end(error=error)
            self._member.present[index] = not seat.ended
        try:
            if not any(self._member.present):
                raise last_words or Interrupted("nobody is left")
        finally:
            del last_words  # which its traceback would keep, with the tensors of the run

    def before_forward(self) -> None:
        """Note a call of the denoiser; the first one ends the encoding."""
        if self._first_forward is not None:
            return
        self._first_forward = time.perf_counter()
        # Pipelines that skip steps (image-to-image) mostly say here how many are left.
        counted = self._pipe.__dict__.get("_num_timesteps")
        self.steps = int(counted or len(self._pipe.scheduler.timesteps))
        if not self.keeps_turn:
            self._pass_turn()
        self.guidance.enter_loop()
        self._at_boundary()

    def _after_step(self, result: Any, timestep: Any) -> Any:
        sample = result[0]
        if sample.is_cuda:
            # Python runs ahead of the device: without this, steps are told that are not done yet.
            torch.cuda.current_stream(sample.device).synchronize()
        self._last_step = time.perf_counter()
        if self._first_forward is None:  # a denoiser by another name
            self.before_forward()
        if not self.step and not self._pipe.__dict__.get("_num_timesteps"):
            self.steps = steps_from(self._pipe.scheduler, timestep)
        self.step += 1
        self.steps = max(self.steps, self.step)
        self._latents = sample
        for seat in self._seats:
            seat.show(self.step, partial(self._picture_of, seat))
        self._at_boundary()
        if self.step < self.steps:
            return result
        # Nobody in the loop may wait for a run that waits for its turn.
        self._member.leave()
        self._refuse_non_finite(sample)
        if not self._holds_turn:
            self._turns.take(self.tell)
            self._holds_turn = True
        if len(self._seats) > 1:
            self.tell()
        self.kept = list(itertools.compress(self._seats, self._member.present))
        self._decoder.prepare(self.output_rows, self.kept)
        return result

    def latents_of(self, seat: Seat) -> torch.Tensor | None:
        """Return the samples of one request after the last step; None where they are not told."""
        if len(self._seats) == 1 or self._latents is None:
            return self._latents
        if len(self._latents) != self._rows.total:
            return None
        return self._latents[self._rows.of(seat)]

    def _picture_of(self, seat: Seat) -> Image.Image | None:
        latents = self.latents_of(seat)
        if latents is None:
            return None
        return self._preview.render(latents, seat.parameters.width, seat.parameters.height)

    def _at_boundary(self) -> None:
        self.tell()
        self.guidance.at_boundary(
            self.step,
            self._member.present,
            self._latents,
            over=self.step >= self.steps,
        )
        self._member.present[:] = [not seat.ended for seat in self._seats]
        if not any(self._member.present):
            raise Interrupted("nobody is left")

    def _refuse_non_finite(self, sample: torch.Tensor) -> None:
        if len(self._seats) == 1 or len(sample) != self._rows.total:
            refuse_non_finite(sample, "the denoiser")
            return
        for seat in self._seats:
            try:
                refuse_non_finite(sample[self._rows.of(seat)], "the denoiser")
            except NonFiniteOutput as error:
                seat.end(error=error)

    def _pass_turn(self) -> None:
        if self._holds_turn:
            self._holds_turn = False
            self._turns.pass_on()
