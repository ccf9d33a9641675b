"""Several runs at once: they take turns to encode and to decode, and share the steps between.

Requests that wait for their turn to begin, and ask for the same (:func:`batch_of`), start as one
pipeline call. Where that fails as a whole, each of them runs by itself.
"""

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workers.devices.chunk import denoisers
from workers.engine.batch import BatchRun, BatchSlot, batch_of, takes_batches
from workers.engine.generation import Generation
from workers.engine.run import Run, Runs, Slot
from workers.failures import short_cause
from workers.patches import forget_state, has_stateful_hooks
from workers.sharing.call import Member
from workers.sharing.rendezvous import Rendezvous

_logger = logging.getLogger(__name__)


class ConcurrentRuns:
    """Serves requests from any number of threads at once.

    Attributes:
        batched_tasks: Tasks whose requests may start together.
        turns: For what the runs share outside their loops.
    """

    def __init__(self, pipe: Any, runs: Runs, rendezvous: Rendezvous) -> None:
        """Have the denoiser calls of `runs` meet at `rendezvous`, which stands before them."""
        self.batched_tasks: Collection[str] = ()
        self.turns = Turns()
        self._runs = runs
        self._rendezvous = rendezvous
        self._denoisers = list(denoisers(pipe).values())
        # Once, for looking through all modules takes longer than a request should.
        self._parts = [part for denoiser in self._denoisers for part in denoiser.modules()]

    @property
    def tasks_for_batches(self) -> list[str]:
        """Tasks whose requests might start together, were that found right."""
        classes = self._runs.pipelines.classes
        return [task for task, kind in classes.items() if takes_batches(task, kind)]

    def serve(self, asked: Slot) -> Generation:
        """Run a request to its end, with those that wait as it does; raises what ends it."""
        slot, task = BatchSlot(asked), asked.parameters.task
        exclusive = has_stateful_hooks(self._parts)
        if not exclusive and task in self.batched_tasks:
            kind = self._runs.pipelines.classes[task]
            slot.batch_key = batch_of(slot.parameters, slot.inputs, kind)
        while True:
            pipe = self._runs.pipelines.copy_for(slot.parameters, slot.inputs)
            batch = self.turns.begin(slot)
            if len(batch) == 1:
                run = Run(self._runs, batch, pipe)
                return run.generation(slot, self._call(run, exclusive=exclusive))
            if batch:
                self._start_batch(pipe, batch)
            generation = slot.result()
            if generation is not None:
                return generation
            slot = BatchSlot(slot)

    def serve_at_once(self, asked: Sequence[Slot]) -> list[Generation]:
        """Run requests of one batch, in this thread."""
        pipe = self._runs.pipelines.copy_for(asked[0].parameters, asked[0].inputs)
        self.turns.take(lambda: None)
        return self._run_batch(pipe, [BatchSlot(each) for each in asked])

    def _call(self, run: Run, *, exclusive: bool = False) -> Any:
        """Call the pipeline of a run whose turn it is; the turn is for others while it denoises.

        An `exclusive` run keeps it, for the denoiser keeps state between its calls.
        """
        asked = run.slots[0].parameters
        outputs = [slot.parameters.num_outputs_per_prompt for slot in run.slots]
        with self._rendezvous.member(
            alone=exclusive or asked.deterministic,
            key=asked.lora or None,
            outputs=outputs,
            present=run.present,
        ) as member:
            if not exclusive:
                run.after_encode.append(self._pass_turn)
            run.after_denoise.append(functools.partial(self._take_turn, member))
            try:
                return run.call()
            finally:
                run.batch_mean = member.batch_mean
                if exclusive:
                    forget_state(self._denoisers)
                self._pass_turn(run)

    def _pass_turn(self, run: Run) -> None:
        if run.holds_turn:
            run.holds_turn = False
            self.turns.pass_on()

    def _take_turn(self, member: Member, run: Run) -> None:
        # Nobody in the loop may wait for a run that waits for its turn.
        member.leave()
        if not run.holds_turn:
            self.turns.take(run.tell)
            run.holds_turn = True

    def _run_batch(self, pipe: Any, batch: Sequence[BatchSlot]) -> list[Generation]:
        run = BatchRun(self._runs, batch, pipe)
        return run.finish(self._call(run))

    def _start_batch(self, pipe: Any, batch: Sequence[BatchSlot]) -> None:
        """Run a batch in a thread of its own, which no request's end ends."""
        # The process waits for it: a thread that is cut off inside torch aborts the process.
        thread = threading.Thread(
            target=self._end_batch, args=(pipe, batch), name="batch", daemon=False
        )
        try:
            thread.start()
        except RuntimeError as error:  # the host has no thread left
            _logger.warning("no thread for requests that start together: %s", error)
            self.turns.pass_on()
            for slot in batch:
                slot.run_by_itself()

    def _end_batch(self, pipe: Any, batch: Sequence[BatchSlot]) -> None:
        failure = None
        try:
            self._run_batch(pipe, batch)
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


_POLL_S = 0.1


class _Ticket:
    def __init__(self, slot: BatchSlot | None) -> None:
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

    def begin(self, slot: BatchSlot) -> Sequence[BatchSlot]:
        """Wait for the turn of `slot`; return whom it starts with, itself first.

        Empty where another has taken it along and works for it. It tells its step every tenth
        of a second while it waits; raises what that raises.
        """
        steps = slot.parameters.num_inference_steps
        ticket = self._wait(lambda: slot.progress.on_step(0, steps), slot)
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

    def _has_room(self, batch: Sequence[BatchSlot], slot: BatchSlot) -> bool:
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

    def _wait(self, tell: Callable[[], None], slot: BatchSlot | None) -> _Ticket:
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


def _fits(ticket: _Ticket, slot: BatchSlot) -> bool:
    return ticket.slot is not None and ticket.slot.batch_key == slot.batch_key
