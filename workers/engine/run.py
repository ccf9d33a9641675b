"""The way through a pipeline: encode, denoise, decode."""

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from PIL import Image

from configs.errors import NonFiniteOutput
from workers.engine.batch import OutputRows, Slot, Turns
from workers.engine.features.guidance import RunningGuidance
from workers.engine.features.preview import Preview
from workers.engine.generation import refuse_non_finite
from workers.engine.progress import Interrupted
from workers.patches import method_signature
from workers.sharing.call import Member


def watch_steps(
    scheduler: Any,
    after_step: Callable[[Any, Any], Any],
    generators: Callable[[], list[torch.Generator]] = list,
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Make `scheduler.step` return what `after_step` makes of its result and its timestep.

    Item 0 of the result is the sample.

    Pipelines of flow models pass it no generator, as most of their schedulers draw nothing. One
    that does would draw from the generator of the process, so it gets `generators`, one for each
    sample.

    Some pipelines copy their scheduler when they are called, and step the copies: for the sound
    beside the pictures (LTX-2), or for each frame (SkyReels-V2). Copies are watched as well. The
    steps of whichever is stepped first are those of the run; after a step of another there is only
    a call of `beside`.
    """
    watch = _Watch(after_step, generators, beside)
    scheduler.step = _WatchedStep(scheduler, watch)


class _Watch:
    """What is done after the steps of a scheduler and of its copies."""

    def __init__(
        self,
        after_step: Callable[[Any, Any], Any],
        generators: Callable[[], list[torch.Generator]],
        beside: Callable[[], None],
    ) -> None:
        self._after_step = after_step
        self._beside = beside
        self.generators = generators
        self._first: Callable[[], _WatchedStep | None] | None = None

    def after(self, step: "_WatchedStep", result: Any, time: Any) -> Any:
        if self._first is None:
            self._first = weakref.ref(step)
        if step is self._first():
            return self._after_step(result, time)
        self._beside()
        return result


class _WatchedStep:
    """Stands as `step` on one scheduler, and on a copy of it as the copy's own."""

    def __init__(self, scheduler: Any, watch: _Watch) -> None:
        step = type(scheduler).step
        # The pipelines look at the signature to decide whether to pass `generator` and `eta`: a
        # wrapper that hides it would drop the seeds without a word.
        self.__signature__ = method_signature(step)
        # Weakly, for together they would keep a scheduler's tensors until they are collected.
        self._scheduler = weakref.ref(scheduler)
        self._step, self._watch = step, watch
        names = list(self.__signature__.parameters)
        # By position or by name; -1 is no position.
        self._sample_at, self._time_at, self._generator_at = (
            names.index(name) if name in names else -1
            for name in ("sample", "timestep", "generator")
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) <= self._generator_at and kwargs.get("generator") is None:
            own, at = self._watch.generators(), self._sample_at
            sample = args[at] if len(args) > at >= 0 else kwargs.get("sample")
            if sample is not None and len(sample) == len(own):
                kwargs["generator"] = own
        time = args[self._time_at] if len(args) > self._time_at >= 0 else kwargs.get("timestep")
        return self._watch.after(self, self._step(self._scheduler(), *args, **kwargs), time)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_WatchedStep":
        # A scheduler that is being copied is there already; of its attributes alone there is none.
        copied = memo.get(id(self._scheduler()))
        return self if copied is None else _WatchedStep(copied, self._watch)


def steps_from(scheduler: Any, time: Any) -> int:
    """Return how many steps there are from the timestep `time` to the last, both counted."""
    times = list(map(float, scheduler.timesteps))
    one = isinstance(time, (int, float)) or (torch.is_tensor(time) and time.numel() == 1)
    here = float(time) if one else None
    return len(times) - (times.index(here) if here in times else 0)


# Pixels of all outputs together.
_DECODED_AT_ONCE = 1024 * 1024


class Decoder:
    """The autoencoder of one pipeline, or none."""

    def __init__(self, vae: Any) -> None:
        """Remember how it is."""
        self._vae = vae
        self._dtype = _dtype(vae)
        self._slicing = getattr(vae, "use_slicing", None)
        self._whole: dict[str, Any] | None = None

    def prepare(self, rows: OutputRows, kept: Sequence[Slot]) -> None:
        """Have those decoded that are `kept` among the requests of `rows`, which it tells if so.

        They cannot be told apart where the autoencoder gets other rows, such as frames; all are
        decoded then. Large outputs of several requests are decoded one by one: memory as for one
        alone.
        """
        asked = rows.slots[0].parameters
        outputs = sum(slot.outputs for slot in kept)
        pixels = outputs * asked.width * asked.height * (asked.num_frames or 1)
        if len(rows.slots) > 1 and pixels > _DECODED_AT_ONCE and self._slicing is False:
            self._vae.use_slicing = True
        if self._vae is not None and len(kept) < len(rows.slots):
            self._leave_out(rows, kept)

    def restore(self) -> None:
        """Undo :meth:`prepare`, and an upcast of a pipeline that an error left in place (SDXL)."""
        if self._vae is None:
            return
        if self._whole is not None:
            vars(self._vae).pop("decode")
            vars(self._vae).update(self._whole)
            self._whole = None
        if self._slicing is False:
            self._vae.use_slicing = False
        if _dtype(self._vae) != self._dtype:
            self._vae.to(dtype=self._dtype)

    def _leave_out(self, rows: OutputRows, kept: Sequence[Slot]) -> None:
        decode, chosen, total = self._vae.decode, rows.of_all(kept), rows.total

        def choose(value: Any) -> Any:
            if torch.is_tensor(value) and value.ndim and len(value) == total:
                return value[torch.tensor(chosen, device=value.device)]
            return value

        @functools.wraps(decode)
        def decode_kept(latents: Any, *args: Any, **options: Any) -> Any:
            if not torch.is_tensor(latents) or len(latents) != total:
                return decode(latents, *args, **options)
            rows.keep(kept)
            args = tuple(choose(each) for each in args)
            options = {name: choose(each) for name, each in options.items()}
            return decode(choose(latents), *args, **options)

        own = vars(self._vae)
        self._whole = {"decode": own["decode"]} if "decode" in own else {}
        own["decode"] = decode_kept


def _dtype(vae: Any) -> torch.dtype | None:
    # `vae.dtype` walks through all parts each time.
    first = None if vae is None else next(vae.parameters(), None)
    return None if first is None else first.dtype


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
        slots: Sequence[Slot],
        turns: Turns,
        member: Member,
        decoder: Decoder,
        preview: Preview,
    ) -> None:
        """Watch `pipe`, whose scheduler must be its own, for `slots` of one batch."""
        self.steps = slots[0].parameters.num_inference_steps
        self.step = 0
        self.kept = list(slots)
        self.output_rows = OutputRows(slots)
        self.keeps_turn = False
        self.guidance = RunningGuidance(slots)
        self.generators: list[torch.Generator] = []
        self._pipe = pipe
        self._slots = slots
        self._rows = OutputRows(slots)
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

    def timings(self, slot: Slot) -> tuple[float, float, float]:
        """Seconds until the first step, from there to the last, and after it; waits included."""
        first = self._ended if self._first_forward is None else self._first_forward
        last = first if self._last_step is None else self._last_step
        return first - slot.arrived, last - first, self._ended - last

    def tell(self) -> None:
        """Tell each `Progress` where the run is; one that raises ends its request.

        Raises:
            BaseException: What the last of them raised, when none is left.
        """
        if len(self._slots) == 1:
            self._slots[0].tell(self.step, self.steps)
            return
        last_words: BaseException | None = None
        for index, slot in enumerate(self._slots):
            if self._member.present[index] and not slot.ended:
                try:
                    slot.tell(self.step, self.steps)
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    last_words = error
                    slot.end(error=error)
            self._member.present[index] = not slot.ended
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
        for slot in self._slots:
            slot.show(self.step, partial(self._picture_of, slot))
        self._at_boundary()
        if self.step < self.steps:
            return result
        # Nobody in the loop may wait for a run that waits for its turn.
        self._member.leave()
        self._refuse_non_finite(sample)
        if not self._holds_turn:
            self._turns.take(self.tell)
            self._holds_turn = True
        if len(self._slots) > 1:
            self.tell()
        self.kept = list(itertools.compress(self._slots, self._member.present))
        self._decoder.prepare(self.output_rows, self.kept)
        return result

    def latents_of(self, slot: Slot) -> torch.Tensor | None:
        """Return the samples of one request after the last step; None where they are not told."""
        if len(self._slots) == 1 or self._latents is None:
            return self._latents
        if len(self._latents) != self._rows.total:
            return None
        return self._latents[self._rows.of(slot)]

    def _picture_of(self, slot: Slot) -> Image.Image | None:
        latents = self.latents_of(slot)
        if latents is None:
            return None
        return self._preview.render(latents, slot.parameters.width, slot.parameters.height)

    def _at_boundary(self) -> None:
        self.tell()
        self.guidance.at_boundary(
            self.step,
            self._member.present,
            self._latents,
            over=self.step >= self.steps,
        )
        self._member.present[:] = [not slot.ended for slot in self._slots]
        if not any(self._member.present):
            raise Interrupted("nobody is left")

    def _refuse_non_finite(self, sample: torch.Tensor) -> None:
        if len(self._slots) == 1 or len(sample) != self._rows.total:
            refuse_non_finite(sample, "the denoiser")
            return
        for slot in self._slots:
            try:
                refuse_non_finite(sample[self._rows.of(slot)], "the denoiser")
            except NonFiniteOutput as error:
                slot.end(error=error)

    def _pass_turn(self) -> None:
        if self._holds_turn:
            self._holds_turn = False
            self._turns.pass_on()
