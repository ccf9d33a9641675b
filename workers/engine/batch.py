"""Requests that start as one pipeline call, and the run of such a batch.

Each stays a request of its own: it is told of its steps, may leave and may fail by itself.
"""

import threading
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, compress
from typing import Any

import torch
from PIL import Image

from configs.parameters import FROM_IMAGE_TASKS, Parameters
from workers.engine.arguments import (
    Inputs,
    arguments_of,
    call_arguments,
    is_edit,
)
from workers.engine.decoder import Decoder
from workers.engine.generation import (
    Generation,
    non_finite,
    output_of,
)
from workers.engine.progress import Interrupted, Progress
from workers.engine.run import Run, Runs, Slot
from workers.families import family_of


class _Told:
    """Tells a `Progress` never less than before, whichever thread it is told by."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step = 0
        self._one_at_a_time = threading.Lock()

    def on_step(self, step: int, steps: int) -> None:
        with self._one_at_a_time:
            self._step = max(self._step, step)
            self._progress.on_step(self._step, max(steps, self._step))

    def guidance(self) -> Mapping[str, float | None]:
        return self._progress.guidance()

    def wants_preview(self) -> bool:
        return self._progress.wants_preview()

    def on_preview(self, step: int, picture: Image.Image) -> None:
        self._progress.on_preview(step, picture)


class BatchSlot(Slot):
    """A request beside others, some of which may start with it.

    Attributes:
        batch_key: Requests of equal ones may start as one pipeline call; None starts by itself.
        outputs: How many it makes.
        by_itself: Whether it is over for those it started with, and begins anew without them.
    """

    def __init__(self, slot: Slot) -> None:
        """Take the request as it came, or as it has to begin anew."""
        progress = slot.progress if isinstance(slot, BatchSlot) else _Told(slot.progress)
        super().__init__(
            slot.parameters,
            progress,
            slot.inputs,
            in_float32=slot.in_float32,
            arrived=slot.arrived,
            steer_from=slot.steer_from,
        )
        self.batch_key: Hashable = None
        self.outputs = slot.parameters.num_outputs_per_prompt
        self.by_itself = False
        self._ending = threading.Lock()
        self._ended = threading.Event()
        self._generation: Generation | None = None
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether it is over, in whatever way, or has to begin anew by itself."""
        return self._ended.is_set()

    def end(self, generation: Generation | None = None, error: BaseException | None = None) -> None:
        """End it; the first end counts."""
        with self._ending:
            if not self.ended:
                self._generation, self._error = generation, error
                self._ended.set()

    def run_by_itself(self) -> None:
        """Send it away from the others, to begin anew."""
        with self._ending:
            if not self.ended:
                self.by_itself = True
                self._ended.set()

    def result(self) -> Generation | None:
        """Wait for the end; None where it has to begin anew by itself.

        Raises:
            BaseException: What it ended with.
        """
        self._ended.wait()
        if self.by_itself:
            return None
        error, self._error = self._error, None
        if error is None:
            return self._generation
        try:
            raise error
        finally:
            del error  # which its traceback would keep, with the tensors of the run


# Given as a list, one for each output; anything else is equal for all requests of a batch.
_OF_EACH = ("prompt", "negative_prompt", "image", "mask_image")


# What a pipeline does not see of a request, or sees as one of `_OF_EACH`.
_OWN = {
    "prompt": "",
    "seed": 0,
    "num_outputs_per_prompt": 1,
    "image": (),
    "mask_image": None,
    "output_format": "png",
    "output_compression": None,
    "preview": False,
}


def takes_batches(task: str, pipeline_class: Any) -> bool:
    """Tell whether one call of the pipeline may get an image for each of several requests."""
    return task not in FROM_IMAGE_TASKS or not family_of(pipeline_class).one_image_for_all


def batch_of(parameters: Parameters, inputs: Inputs, pipeline_class: Any) -> Hashable:
    """Return what requests have in common that may start together; None where it starts alone."""
    images = len(inputs.images)
    # A list of images is then those of one prompt; a crop about the mask is of one picture.
    alone = parameters.deterministic or parameters.padding_mask_crop is not None
    if alone or images > 1:
        return None
    negative = None if parameters.negative_prompt is None else ""
    # Those that start from the pixels get every image in the size of the output.
    own_size = bool(images) and is_edit(arguments_of(pipeline_class))
    size = inputs.images[0].size if own_size else None
    common = parameters.with_changes({**_OWN, "negative_prompt": negative})
    return common, images, inputs.mask is not None, size


def batch_arguments(slots: Sequence[BatchSlot], pipeline_class: Any) -> dict[str, Any]:
    """Return the arguments of one call for requests of one batch, of a pipeline of that class."""
    calls: list[dict[str, Any]] = []
    for slot in slots:
        single = slot.parameters.with_changes({"num_outputs_per_prompt": 1})
        calls += [call_arguments(single, pipeline_class, slot.inputs)] * slot.outputs
    joint = dict(calls[0])
    for name in _OF_EACH:
        if name in joint:
            joint[name] = [call[name] for call in calls]
    joint["generator"] = [
        torch.Generator("cpu").manual_seed(seed)
        for slot in slots
        for seed in slot.parameters.seeds()
    ]
    return joint


class OutputRows:
    """Rows of the outputs of several requests, one for each.

    Attributes:
        slots: The requests, in the order of their rows.
        total: Rows of all of them.
    """

    def __init__(self, slots: Sequence[BatchSlot]) -> None:
        """Lay them out."""
        self.keep(slots)

    def keep(self, slots: Sequence[BatchSlot]) -> None:
        """Lay out these only, for the others have no rows any more."""
        self.slots = tuple(slots)
        ends = list(accumulate(slot.outputs for slot in slots))
        self.total = ends[-1]
        self._rows: dict[Slot, slice] = {
            slot: slice(end - slot.outputs, end) for slot, end in zip(slots, ends, strict=True)
        }

    def of(self, slot: Slot) -> slice:
        """Return the rows of one request."""
        return self._rows[slot]

    def of_all(self, slots: Sequence[BatchSlot]) -> list[int]:
        """Return the rows of some of the requests."""
        return [row for slot in slots for row in range(self.total)[self._rows[slot]]]


class BatchRun(Run):
    """The run of several requests.

    Attributes:
        kept: The requests that stayed to the end, in their order.
        output_rows: Which rows of the output are whose.
    """

    slots: Sequence[BatchSlot]

    def __init__(self, runs: Runs, slots: Sequence[BatchSlot], pipe: Any) -> None:
        """Run `pipe`, whose scheduler must be its own, for `slots` of one batch."""
        super().__init__(runs, slots, pipe)
        self.kept: Sequence[BatchSlot] = list(slots)
        self.output_rows = OutputRows(slots)
        self._rows = OutputRows(slots)

    def make_arguments(self) -> dict[str, Any]:
        """Return the arguments of the pipeline's call for all requests."""
        return batch_arguments(self.slots, type(self.pipe))

    def tell(self) -> None:
        """Tell each request where the run is; one whose `Progress` raises is ended.

        Raises:
            BaseException: What the last of them raised, when none is left.
        """
        last_words: BaseException | None = None
        for index, slot in enumerate(self.slots):
            if self.present[index] and not slot.ended:
                try:
                    slot.progress.on_step(self.step, self.steps)
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    last_words = error
                    slot.end(error=error)
            self.present[index] = not slot.ended
        try:
            if not any(self.present):
                raise last_words or Interrupted("nobody is left")
        finally:
            del last_words  # which its traceback would keep, with the tensors of the run

    def at_boundary(self) -> None:
        """Between two steps, let those go that have to begin anew."""
        super().at_boundary()
        self.present[:] = [not slot.ended for slot in self.slots]
        if not any(self.present):
            raise Interrupted("nobody is left")

    def refuse_non_finite(self, sample: torch.Tensor) -> None:
        """End the requests whose samples are no numbers."""
        if len(sample) != self._rows.total:
            super().refuse_non_finite(sample)
            return
        finite = torch.isfinite(sample).flatten(1).all(1).tolist()
        for slot in self.slots:
            if not all(finite[self._rows.of(slot)]):
                slot.end(error=non_finite("the denoiser"))

    def rows_of(self, slot: Slot) -> slice:
        """Return which of the samples are those of a request."""
        return self._rows.of(slot)

    def latents_of(self, slot: Slot) -> torch.Tensor | None:
        """Return the samples of one request after the last step; None where they are not told."""
        if self.latents is None or len(self.latents) != self._rows.total:
            return None
        return self.latents[self._rows.of(slot)]

    def finish(self, output: Any) -> list[Generation]:
        """End the requests that stayed, each with its part of the output."""
        rows, generations = self.output_rows, []
        for slot in self.kept:
            own = output_of(output, rows.of(slot), rows.total)
            generations.append(self.generation(slot, own))
            slot.end(generations[-1])
        return generations

    def prepare_decoder(self, decoder: Decoder) -> None:
        """Get it ready for the outputs of those that stayed; the rows of others are left out."""
        self.tell()
        self.kept = list(compress(self.slots, self.present))
        decoder.prepare(self.slots[0].parameters, sum(slot.outputs for slot in self.kept))
        if len(self.kept) < len(self.slots):
            rows = self.output_rows
            decoder.keep_rows(rows.of_all(self.kept), rows.total, lambda: rows.keep(self.kept))
