"""The runner: claims the next request of the queue, has the engine run it, records the outcome.

The files of a finished run are encoded and stored by other threads, so that the engine works on the
next request meanwhile. The record says `running` until they are stored.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, ParamSpec, TypeVar

from redis.exceptions import RedisError

from configs.errors import DeviceLost, GenerationFailed, ServingError, TimedOut
from routing.broker import Broker
from routing.claims import Claims, Finished, Moved, MustRunAlone
from routing.request import Failure, Outcome, Request, Status, Timings
from workers.engine.arguments import Inputs
from workers.engine.engine import Engine, Generation
from workers.engine.progress import Interrupted
from workers.outputs import OutputWriter
from workers.progress import Reporter, RunningRequest, Stop, moving_mean

_RETRY_S: Final = (0.2, 0.5, 1.0, 2.0)
_P = ParamSpec("_P")
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Runner:
    """Runs requests for one replica, each in the thread that calls :meth:`run_next`.

    Attributes:
        runs: What runs now and what is being stored, by the ids of the requests.
        on_device_lost: Called with the reason once the device cannot be used any more.
        capacity: Requests that the engine may run at a time; as many more may be stored meanwhile.
        preview_every_s: Seconds between two previews of one run.
        closed: Whether nothing more is claimed.
        step_s: Seconds that a step takes; None before the first.
        held_back: One entry for each wake-up that came while a request had to run alone.
    """

    name: str
    incarnation: str
    engine: Engine
    claims: Claims
    writer: OutputWriter
    broker: Broker
    reporter: Reporter
    runs: dict[str, RunningRequest]
    on_device_lost: Callable[[str], None]
    capacity: int = 1
    preview_every_s: float = 0.5
    closed: threading.Event = field(default_factory=threading.Event)
    step_s: float | None = None
    held_back: deque[None] = field(default_factory=deque)
    _stopped_for: Stop | None = None
    _device_lost: bool = False
    _orphans: frozenset[str] = frozenset()
    _storage: ThreadPoolExecutor = field(init=False)
    _room_to_store: threading.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        """Start no thread before there is something to store."""
        self._storage = ThreadPoolExecutor(self.capacity, thread_name_prefix="store")
        self._room_to_store = threading.Semaphore(self.capacity)

    def run_next(self) -> str | None:
        """Run the first request of the queue; return its id, None where nothing waited.

        Where the queue is empty it is one that waits for another replica of the stage.

        Its outputs may still be on their way to the store then. Where as many as may run are, it
        waits until one is stored.

        Raises:
            redis.RedisError: Redis was away before anything was claimed.
        """
        if self.closed.is_set():
            return None
        with self.engine.request_coming():
            try:
                claim = self.claims.claim(self.name, self.incarnation)
            except MustRunAlone:
                self.held_back.append(None)
                if not self.runs:  # what it had to wait for has ended just now
                    self._wake_held_back()
                return None
            if claim is None:
                return None
            request = claim.request
            if claim.others_wait:
                self._wake_self()  # it is read once there is room
            run = RunningRequest(request, self.reporter.wake, preview_every_s=self.preview_every_s)
            self.runs[request.id] = run
            if self._stopped_for is not None:  # claimed while the others were being stopped
                run.stop(self._stopped_for)
            self.reporter.wake()
            made = None
            try:
                made = self._generate(run)
            finally:
                if made is None:
                    self._leave(run)
        if made is not None:
            self._hand_to_storage(run, made)
        return request.id

    def finish(self) -> None:
        """Wait until all that was made is stored and recorded; leave no claim behind.

        Called when nothing runs any more; a claim that would stay counted as a crash.
        """
        self._storage.shutdown()
        try:
            self._return(self._orphaned_claims())
        except RedisError as error:
            _logger.warning(
                "what this replica still holds by the records is the sweep's: %s", error
            )

    def cancel(self, request_id: str, attempt: int) -> bool:
        """Stop a run at its next step; False where it does not run here."""
        run = self.runs.get(request_id)
        found = run is not None and run.request.attempt == attempt
        if run is not None and found:
            run.stop(Stop.CANCELED)
        return found

    def refresh(self, request_id: str, attempt: int) -> bool:
        """Have a run's record read again; False where it does not run here."""
        run = self.runs.get(request_id)
        found = run is not None and run.request.attempt == attempt
        if found:
            self.reporter.wake()
        return found

    def has_room(self) -> bool:
        """Whether another request could be claimed now."""
        # What must run alone fills the replica; the wake-ups that come meanwhile are kept.
        alone = self.runs and self.held_back
        return not alone and self._in_engine() < self.capacity

    def stop_all(self, why: Stop) -> None:
        """Claim nothing more, and end every run at its next step."""
        self.closed.set()
        self._stopped_for = why
        for run in list(self.runs.values()):
            run.stop(why)

    def hand_back_all(self) -> None:
        """Have every run end at its next step, for another replica; more may be claimed after."""
        for run in list(self.runs.values()):
            run.stop(Stop.HAND_BACK)

    def return_orphaned_claims(self) -> None:
        """Hand back what runs here by the records and does not: a claim whose answer got lost.

        Only what was orphaned at the call before too, since a claim may be on its way just now.

        Raises:
            redis.RedisError: Redis did not answer; the next call does it.
        """
        orphans = self._orphaned_claims()
        self._return([request for request in orphans if request.id in self._orphans])
        self._orphans = frozenset(request.id for request in orphans)

    def _orphaned_claims(self) -> list[Request]:
        held = [
            each for each in self.claims.running_at(self.name) if each.owner == self.incarnation
        ]
        return [request for request in held if request.id not in self.runs]

    def _return(self, orphans: list[Request]) -> None:
        for request in orphans:
            _logger.warning("%s was claimed and does not run; it is handed back", request.id)
            self._wake_owner(self.claims.hand_back(request))

    def _in_engine(self) -> int:
        return sum(not run.storing for run in list(self.runs.values()))

    def _leave(self, run: RunningRequest) -> None:
        """Let go of a run that has ended, and send the wake-ups again that came meanwhile."""
        # Another attempt of the same request may run here by now.
        if self.runs.get(run.request.id) is run:
            del self.runs[run.request.id]
        self._wake_held_back()

    def _wake_held_back(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self.held_back.popleft()
                self._wake_self()

    def _wake_self(self) -> None:
        self.broker.wake(self.name, "-", 0)

    def _generate(self, run: RunningRequest) -> Generation | None:
        """Have the engine run a request; None where it ended without outputs, which is recorded."""
        request, parameters = run.request, run.request.parameters
        try:
            has_inputs = parameters.image or parameters.mask_image
            inputs = Inputs.read(parameters, self.writer.store.read) if has_inputs else None
            made = self.engine.generate(parameters, run, inputs)
            if run.step_s is not None:
                self.step_s = moving_mean(self.step_s, run.step_s)
        except Interrupted as interrupted:
            outcome = self._stopped(run, Stop(interrupted.reason))
            if outcome is not None:
                self._record(run, outcome)
        except DeviceLost as lost:
            self._lose_device(request, lost)
        except Exception as error:  # noqa: BLE001 - logged and recorded
            self._record(run, _failure(request, error))
        else:
            return made
        return None

    def _hand_to_storage(self, run: RunningRequest, made: Generation) -> None:
        self._room_to_store.acquire()
        run.begin_storing()
        try:
            self._storage.submit(self._store, run, made)
        except RuntimeError:  # the process ends, or the host has no thread left
            self._store(run, made)

    def _store(self, run: RunningRequest, made: Generation) -> None:
        """Store what a run made, and record how it ended."""
        try:
            begun = time.monotonic()
            outputs = self.writer.write(run.request, made)
            store_s = time.monotonic() - begun
            timings = Timings(
                made.encode_s, made.denoise_s, made.decode_s, made.batch_mean, store_s
            )
            outcome = Outcome(Status.SUCCEEDED, outputs, tuple(made.warnings), timings)
        except Exception as error:  # noqa: BLE001 - logged and recorded
            outcome = _failure(run.request, error)
        try:
            self._record(run, outcome)
        finally:
            self._leave(run)
            self._room_to_store.release()

    def _record(self, run: RunningRequest, outcome: Outcome) -> None:
        """Record how a run ended, and remove files that count for nothing.

        They are its own where its claim no longer holds, and else those of an earlier attempt that
        died between storing and recording them.
        """
        request = run.request
        outcome = replace(outcome, step=run.step, steps=run.steps)
        finished = _insist(self.claims.finish, request, outcome)
        if finished is Finished.OTHERS_WAIT and not self.closed.is_set():
            self._wake_self()
        if finished is Finished.NOT_OURS:
            _logger.warning(
                "%s attempt %d ended unrecorded: it was canceled or moved to another replica",
                request.id,
                request.attempt,
            )
            self.writer.remove(outcome.outputs)
        elif request.attempt > 1:
            self.writer.remove_earlier(request)

    def _stopped(self, run: RunningRequest, why: Stop) -> Outcome | None:
        """Return how a stopped run ended; None where it goes on elsewhere."""
        request = run.request
        match why:
            case Stop.CANCELED:
                return Outcome(Status.CANCELED)
            case Stop.TIMEOUT:
                return _failed(TimedOut.code, f"The run exceeded its timeout of {run.timeout:g} s.")
            case Stop.LOST:
                _logger.warning(
                    "%s attempt %d was moved to another replica", request.id, request.attempt
                )
            case Stop.HAND_BACK | Stop.SUSPECT:
                self._hand_back(request, suspect=why is Stop.SUSPECT)
        return None

    def _lose_device(self, request: Request, lost: DeviceLost) -> None:
        """Give all runs up: the only one is to blame; of several each may be, so they run alone.

        The device reports a fault to whoever calls it next, which need not be who caused it.
        """
        only = self._in_engine() == 1 and not self._device_lost
        self._device_lost = True
        self.stop_all(Stop.SUSPECT)
        _logger.critical("while it ran %s, attempt %d: %s", request.id, request.attempt, lost)
        if only:
            self._wake_owner(_insist(self.claims.move_crashed, request))
        else:
            self._hand_back(request, suspect=True)
        self.on_device_lost(f"{lost} (while it ran {request.id})")

    def _hand_back(self, request: Request, *, suspect: bool) -> None:
        self._wake_owner(_insist(self.claims.hand_back, request, suspect=suspect))

    def _wake_owner(self, move: Moved | None) -> None:
        if move:
            _logger.info(
                "%s was handed back; attempt %d goes to %s", move.id, move.attempt, move.replica
            )
            self.broker.wake(move.replica, move.id, move.attempt)


def _insist(record: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call `record` until Redis answers: an outcome must not get lost."""
    tries = 0
    while True:
        try:
            return record(*args, **kwargs)
        except RedisError as error:
            pause = _RETRY_S[min(tries, len(_RETRY_S) - 1)]
            _logger.warning("an outcome was not recorded, trying again in %g s: %s", pause, error)
            tries += 1
            time.sleep(pause)


def _failure(request: Request, error: Exception) -> Outcome:
    """Return the outcome of a request that an error ended, which it logs."""
    if isinstance(error, ServingError):
        _logger.warning("%s failed: %s", request.id, error)
        return _failed(error.code, str(error), retryable=error.retryable)
    _logger.error("%s failed by a fault of the replica", request.id, exc_info=error)
    return _failed(
        GenerationFailed.code, "The replica failed unexpectedly; see its log for the cause."
    )


def _failed(code: str, message: str, *, retryable: bool = False) -> Outcome:
    return Outcome(Status.FAILED, error=Failure(code, message, retryable))
