"""One request's way through a pipeline: encode, denoise, decode.

It sees the way from two places that every diffusers family passes: the call of the denoiser and
`scheduler.step`. Step callbacks are not used, for some families take and ignore them (PixArt).
Outside the denoising loop runs take turns, because text encoders, tokenizers and autoencoders keep
state between calls, and so that the peak of memory is that of one. Inside the loop they are free.
It knows nothing of families, parameters and outputs.
"""

import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import torch

from workers.finite import refuse_non_finite
from workers.observer import Observer

_TURN_POLL_S = 0.1


class DenoisingRun:
    """Watches one call of one pipeline copy; use as a context around the call, in one thread.

    Attributes:
        steps: Denoising steps of this run, in calls of the scheduler.
        step: Those done.
        warnings: Sentences for the client.
    """

    def __init__(
        self,
        pipe: Any,
        observer: Observer,
        steps: int,
        turn: threading.Lock,
        leave: Callable[[], None],
        show: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Watch `pipe`, whose scheduler must be its own; an engine's runs share `turn`.

        `leave` is called after the last step, before the turn to decode is waited for; `show` after
        each step, with its number and the latents.
        """
        self.steps = steps
        self.step = 0
        self.warnings: list[str] = []
        self._pipe = pipe
        self._observer = observer
        self._turn = turn
        self._leave = leave
        self._show = show
        self._holds_turn = False
        self._started = self._ended = time.perf_counter()
        self._first_forward: float | None = None
        self._last_step: float | None = None

    def __enter__(self) -> Self:
        self._take_turn()
        watch_steps(self._pipe.scheduler, self._after_step)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.perf_counter()
        self._pass_turn()
        # The wrapped step closes a cycle that would keep a multistep scheduler's tensors until the
        # next garbage collection.
        self._pipe.scheduler.__dict__.pop("step", None)

    @property
    def holds_turn(self) -> bool:
        """Whether this run may touch what the runs share: outside its denoising loop."""
        return self._holds_turn

    @property
    def timings(self) -> tuple[float, float, float]:
        """Seconds until the first step, from there to the last, and after it; waits included."""
        first = self._ended if self._first_forward is None else self._first_forward
        last = first if self._last_step is None else self._last_step
        return first - self._started, last - first, self._ended - last

    def tell(self) -> None:
        """Tell the observer where the run is; raises what it raises."""
        self._observer.on_step(self.step, self.steps)

    def before_forward(self) -> None:
        """Note a call of the denoiser; the first one ends the encoding."""
        if self._first_forward is not None:
            return
        self._first_forward = time.perf_counter()
        # Pipelines that skip steps (image-to-image) say here how many are left; the others do not.
        counted = self._pipe.__dict__.get("_num_timesteps")
        self.steps = int(counted or len(self._pipe.scheduler.timesteps))
        self._pass_turn()
        self._at_boundary()

    def _after_step(self, result: Any) -> None:
        sample = result[0]
        if sample.is_cuda:
            # Python runs ahead of the device: without this, steps are told that are not done yet.
            torch.cuda.current_stream(sample.device).synchronize()
        self._last_step = time.perf_counter()
        if self._first_forward is None:  # a denoiser by another name
            self.before_forward()
        self.step += 1
        self.steps = max(self.steps, self.step)
        self._show(self.step, sample)
        self._at_boundary()
        if self.step == self.steps:
            # Nobody in the loop may wait for a run that waits for its turn.
            self._leave()
            refuse_non_finite(sample, "the denoiser")
            self._take_turn()

    def _at_boundary(self) -> None:
        self.tell()
        wanted = self._observer.guidance_scale()
        if wanted is not None and not change_guidance(self._pipe, wanted):
            warning = f"guidance_scale could not be changed to {wanted:g} while running"
            if warning not in self.warnings:
                self.warnings.append(warning)

    def _take_turn(self) -> None:
        while not self._holds_turn:
            self._holds_turn = self._turn.acquire(timeout=_TURN_POLL_S)
            if not self._holds_turn:
                self.tell()

    def _pass_turn(self) -> None:
        if self._holds_turn:
            self._holds_turn = False
            self._turn.release()


def watch_steps(scheduler: Any, after_step: Any) -> None:
    """Make `scheduler.step` call `after_step` with its result; item 0 of it is the new sample."""
    step = scheduler.step

    # The pipelines look at the signature to decide whether to pass `generator` and `eta`: a wrapper
    # that hides it would drop the seeds without a word.
    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        after_step(result)
        return result

    scheduler.step = watched


def change_guidance(pipe: Any, scale: float) -> bool:
    """Set the guidance scale of a running pipeline; return whether it now runs with it.

    Only between two scales that both do classifier-free guidance: the batch of the loop was laid
    out for it before the first step. Families whose loop keeps its own copy of the scale cannot
    change it.
    """
    current = pipe.__dict__.get("_guidance_scale")
    if current == scale:
        return True
    if (
        current is None
        or not _loop_reads_guidance(type(pipe))
        or not pipe.do_classifier_free_guidance
    ):
        return False
    pipe._guidance_scale = scale
    if not pipe.do_classifier_free_guidance:
        pipe._guidance_scale = current
        return False
    return True


def _loop_reads_guidance(pipeline_class: Any) -> bool:
    # Sana and PixArt multiply by the argument; others read `self.guidance_scale` at each step.
    if not hasattr(pipeline_class, "do_classifier_free_guidance"):
        return False
    return "guidance_scale" in inspect.unwrap(pipeline_class.__call__).__code__.co_names
