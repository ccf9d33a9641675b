"""Requests inside the engine: their turns, and which of them start as one pipeline call."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
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
from workers.engine.generation import Generation
from workers.engine.progress import Progress
from workers.families import family_of


class Slot:
    """A request, alone or among others that started with it.

    Attributes:
        batch_key: Requests of equal ones may start as one pipeline call; None starts by itself.
        outputs: How many it makes.
        by_itself: Whether it is over for those it started with, and begins anew without them.
        steer_from: Step before which changes of its guidance do not count, since it has run that
            far without them.
        warnings: Sentences for the client.
        arrived: When, on the clock of `time.perf_counter`.
    """

    def __init__(self, parameters: Parameters, progress: Progress, inputs: Inputs) -> None:
        """Take the request as it came."""
        self.parameters = parameters
        self.inputs = inputs
        self.batch_key: Hashable = None
        self.outputs = parameters.num_outputs_per_prompt
        self.by_itself = False
        self.steer_from = 0
        self.warnings: list[str] = []
        self.arrived = time.perf_counter()
        self._progress = progress
        self._told = 0
        self._turn_to_tell = threading.Lock()
        self._ended = threading.Event()
        self._generation: Generation | None = None
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether it is over, in whatever way, or has to begin anew by itself."""
        return self._ended.is_set()

    def tell(self, step: int, steps: int) -> None:
        """Tell how far it is, never less than before; raises what the `Progress` raises."""
        with self._turn_to_tell:
            self._told = max(self._told, step)
            self._progress.on_step(self._told, max(steps, self._told))

    def show(self, step: int, picture: Callable[[], Image.Image | None]) -> None:
        """Show how it looks after `step`, if that is wanted."""
        if self.ended or not self._progress.wants_preview():
            return
        shown = picture()
        if shown is not None:
            self._progress.on_preview(step, shown)

    def wanted_guidance(self, step: int) -> Mapping[str, float | None]:
        """Return the scales that were changed, by name, if they count from `step` on."""
        return self._progress.guidance() if step >= self.steer_from else {}

    def end(self, generation: Generation | None = None, error: BaseException | None = None) -> None:
        """End it; the first end counts."""
        with self._turn_to_tell:
            if not self.ended:
                self._generation, self._error = generation, error
                self._ended.set()

    def run_by_itself(self) -> None:
        """Send it away from the others, to begin anew."""
        with self._turn_to_tell:
            if not self.ended:
                self.by_itself = True
                self._ended.set()

    def anew(self) -> "Slot":
        """Return a slot for the same request that starts by itself and goes on telling."""
        slot = Slot(self.parameters, self._progress, self.inputs)
        slot.steer_from = self.steer_from
        slot.arrived, slot._told = self.arrived, self._told
        return slot

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
    # A list of images is then those of one prompt.
    if parameters.deterministic or images > 1:
        return None
    negative = None if parameters.negative_prompt is None else ""
    # Those that start from the pixels get every image in the size of the output.
    own_size = bool(images) and is_edit(arguments_of(pipeline_class))
    size = inputs.images[0].size if own_size else None
    common = parameters.with_changes({**_OWN, "negative_prompt": negative})
    return common, images, inputs.mask is not None, size


def batch_arguments(slots: Sequence[Slot], pipeline_class: Any) -> dict[str, Any]:
    """Return the arguments of one call for requests of one batch, of a pipeline of that class."""
    if len(slots) == 1:
        return call_arguments(slots[0].parameters, pipeline_class, slots[0].inputs)
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

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Lay them out."""
        self.keep(slots)

    def keep(self, slots: Sequence[Slot]) -> None:
        """Lay out these only, for the others have no rows any more."""
        self.slots = tuple(slots)
        ends = list(accumulate(slot.outputs for slot in slots))
        self.total = ends[-1]
        self._rows = {
            slot: slice(end - slot.outputs, end) for slot, end in zip(slots, ends, strict=True)
        }

    def of(self, slot: Slot) -> slice:
        """Return the rows of one request."""
        return self._rows[slot]

    def of_all(self, slots: Sequence[Slot]) -> list[int]:
        """Return the rows of some of the requests."""
        return [row for slot in slots for row in range(self.total)[self._rows[slot]]]


_POLL_S = 0.1


class _Ticket:
    def __init__(self, slot: Slot | None) -> None:
        self.slot = slot
        self.called = threading.Event()
        self.taken_along = False


class Turns:
    """Belongs to one engine; a turn belongs to a run, not to a thread.

    Attributes:
        patience_s: Longest that one whose turn it is waits for those that are about to come.
        most_outputs: Of those that start together. Each is a text to encode at once, and attention
            of a text encoder takes a hundred megabytes for one (T5-XXL, 512 tokens).
    """

    def __init__(self) -> None:
        """The turn is free."""
        self.patience_s = 0.005
        self.most_outputs = 16
        self._lock = threading.Lock()
        self._taken = False
        self._queue: deque[_Ticket] = deque()
        self._coming = 0
        self._nobody_comes = threading.Condition(self._lock)
        self._thread = threading.local()

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Say that this thread may be about to bring a request; it has come or not at the end."""
        with self._lock:
            self._coming += 1
            self._thread.is_coming = True
        try:
            yield
        finally:
            with self._lock:
                self._has_come()

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._queue)

    def begin(self, slot: Slot) -> Sequence[Slot]:
        """Wait for the turn of `slot`; return whom it starts with, itself first.

        Empty where another has taken it along and works for it. It tells its step every tenth
        of a second while it waits; raises what that raises.
        """
        steps = slot.parameters.num_inference_steps
        ticket = self._wait(lambda: slot.tell(0, steps), slot)
        if ticket.taken_along:
            return ()
        batch = [slot]
        with self._lock:
            if slot.batch_key is not None:
                self._nobody_comes.wait_for(lambda: not self._coming, self.patience_s)
                for ticket in [each for each in self._queue if _fits(each, slot)]:
                    if ticket.slot is None or not self._has_room(batch, ticket.slot):
                        continue
                    self._queue.remove(ticket)
                    ticket.taken_along = True
                    ticket.called.set()
                    batch.append(ticket.slot)
        return batch

    def _has_room(self, batch: Sequence[Slot], slot: Slot) -> bool:
        return sum(each.outputs for each in (*batch, slot)) <= self.most_outputs

    def take(self, tell: Callable[[], None]) -> None:
        """Wait for the turn; `tell` is called every tenth of a second and may raise."""
        self._wait(tell, None)

    def pass_on(self) -> None:
        """Give the turn to whoever waits first; called by the run that has it."""
        with self._lock:
            if self._queue:
                self._queue.popleft().called.set()
            else:
                self._taken = False

    def _wait(self, tell: Callable[[], None], slot: Slot | None) -> _Ticket:
        ticket = _Ticket(slot)
        with self._lock:
            self._has_come()
            if not self._taken:
                self._taken = True
                return ticket
            self._queue.append(ticket)
        try:
            while not ticket.called.wait(_POLL_S):
                tell()
        except BaseException as error:
            self._withdraw(ticket, error)
            raise
        return ticket

    def _has_come(self) -> None:
        if getattr(self._thread, "is_coming", False):
            self._thread.is_coming = False
            self._coming -= 1
            if not self._coming:
                self._nobody_comes.notify_all()

    def _withdraw(self, ticket: _Ticket, error: BaseException) -> None:
        with self._lock:
            waits = ticket in self._queue
            if waits:
                self._queue.remove(ticket)
        if ticket.taken_along and ticket.slot is not None:
            ticket.slot.end(error=error)
        elif not waits:
            self.pass_on()


def _fits(ticket: _Ticket, slot: Slot) -> bool:
    return ticket.slot is not None and ticket.slot.batch_key == slot.batch_key
