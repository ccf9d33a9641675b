"""The runner: takes the next request of the queue, has the engine run it, records the outcome."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from redis.exceptions import RedisError

from configs.errors import DeviceLost, GenerationFailed, ServingError, TimedOut
from routing.broker import Broker
from routing.claims import Claims, Moved, MustRunAlone
from routing.request import Failure, Outcome, Request, Status, Timings
from workers.engine.arguments import Inputs
from workers.engine.engine import Engine
from workers.engine.generation import Interrupted
from workers.outputs import OutputWriter
from workers.progress import Run, Stop, lately

_logger = logging.getLogger(__name__)


_RETRY_S: Final = (0.2, 0.5, 1.0, 2.0)


_Recorded = TypeVar("_Recorded")


class Settlement:
    """Records how the runs of one replica end."""

    def __init__(self, claims: Claims, broker: Broker) -> None:
        """Record by `claims`; wake the replicas that requests are handed to by `broker`."""
        self._claims = claims
        self._broker = broker

    def finish(self, request: Request, outcome: Outcome) -> bool:
        """Record how an attempt ended; False where it was canceled or belongs to another by now."""
        return _insist(lambda: self._claims.finish(request, outcome))

    def hand_back(self, request: Request, *, suspect: bool = False) -> None:
        """Have a request run elsewhere, alone if it is suspected of what befell its replica."""
        self._wake(_insist(lambda: self._claims.hand_back(request, suspect=suspect)))

    def crash(self, request: Request) -> None:
        """Count a crash against a request, which runs elsewhere unless that was one too many."""
        self._wake(_insist(lambda: self._claims.move_crashed(request)))

    def return_stray(self, request: Request) -> None:
        """Hand back a request that does not run here.

        Raises:
            redis.RedisError: Redis did not answer; the record still says that it runs here.
        """
        self._wake(self._claims.hand_back(request))

    def _wake(self, move: Moved | None) -> None:
        if move:
            _logger.info(
                "%s handed back; attempt %d goes to %s", move.id, move.attempt, move.replica
            )
            self._broker.wake(move.replica, move.id, move.attempt)


def _insist(record: Callable[[], _Recorded]) -> _Recorded:
    tries = 0
    while True:
        try:
            return record()
        except RedisError as error:
            pause = _RETRY_S[min(tries, len(_RETRY_S) - 1)]
            _logger.warning("an outcome was not recorded, trying again in %g s: %s", pause, error)
            tries += 1
            time.sleep(pause)


@dataclass(slots=True)
class Runner:
    """Runs requests for one replica, each in the thread that calls :meth:`run_next`."""

    name: str
    incarnation: str
    engine: Engine
    claims: Claims
    writer: OutputWriter
    broker: Broker
    on_progress: Callable[[], None]
    on_device_lost: Callable[[str], None]
    preview_every_s: float = 0.5
    runs: dict[str, Run] = field(default_factory=dict)
    closed: threading.Event = field(default_factory=threading.Event)
    step_s: float | None = None
    held_back: deque[None] = field(default_factory=deque)
    stopped_for: Stop | None = None
    device_lost: bool = False
    strays: frozenset[str] = frozenset()
    _settlement: Settlement = field(init=False)

    def __post_init__(self) -> None:
        self._settlement = Settlement(self.claims, self.broker)

    def run_next(self) -> str | None:
        """Run the first request of the line to its end; return its id, None where nothing waited.

        Raises:
            redis.RedisError: Redis was away before anything was claimed.
        """
        if self.closed.is_set():
            return None
        with self.engine.request_coming():
            return self._run_next()

    def _run_next(self) -> str | None:
        try:
            request = self.claims.claim(self.name, self.incarnation)
        except MustRunAlone:
            self.held_back.append(None)
            return None
        if request is None:
            return None
        run = self.runs[request.id] = Run(
            request, self.on_progress, preview_every_s=self.preview_every_s
        )
        if self.stopped_for is not None:  # claimed while the others were being stopped
            run.stop(self.stopped_for)
        self.on_progress()
        try:
            self._settle(run)
        finally:
            del self.runs[request.id]
        self._make_up()
        return request.id

    def stop_all(self, why: Stop) -> None:
        """Take nothing more, and end every run at its next step."""
        self.closed.set()
        self.stopped_for = why
        for run in list(self.runs.values()):
            run.stop(why)

    def hand_back_all(self) -> None:
        """Have every run end at its next step, for another replica; more may be taken after."""
        for run in list(self.runs.values()):
            run.stop(Stop.HAND_BACK)

    def return_strays(self) -> None:
        """Hand back what the records say runs here and does not: a claim whose answer got lost.

        Only what was a stray at the call before too, since a claim may be on its way just now.

        Raises:
            redis.RedisError: Redis did not answer; the next call does it.
        """
        held = {
            request.id: request
            for request in self.claims.running_at(self.name)
            if request.owner == self.incarnation
        }
        strays = frozenset(held.keys() - self.runs.keys())
        for request_id in strays & self.strays:
            _logger.warning("%s was claimed and does not run; it is handed back", request_id)
            self._settlement.return_stray(held[request_id])
        self.strays = strays

    def _make_up(self) -> None:
        """Send the wake-ups again that came while a request had to run alone."""
        with contextlib.suppress(IndexError):
            while True:
                self.held_back.popleft()
                self.broker.wake(self.name, "-", 0)

    def _settle(self, run: Run) -> None:
        request = run.request
        try:
            outcome = self._outcome(run)
        except Interrupted as interrupted:
            match Stop(interrupted.reason):
                case Stop.CANCELED:
                    outcome = Outcome(Status.CANCELED)
                case Stop.TIMEOUT:
                    outcome = _failed(
                        TimedOut.code, f"It ran longer than its timeout of {run.timeout:g} s."
                    )
                case Stop.HAND_BACK:
                    self._settlement.hand_back(request)
                    return
                case Stop.LOST:
                    _logger.warning(
                        "%s attempt %d belongs to another replica now", request.id, request.attempt
                    )
                    return
                case Stop.SUSPECT:
                    self._settlement.hand_back(request, suspect=True)
                    return
        except DeviceLost as lost:
            self._lose_device(run, lost)
            return
        outcome = outcome.at(run.step, run.steps)
        if not self._settlement.finish(request, outcome):
            _logger.warning(
                "%s attempt %d ended unrecorded: canceled, or no longer ours",
                request.id,
                request.attempt,
            )
            self.writer.remove(outcome.outputs)

    def _outcome(self, run: Run) -> Outcome:
        request = run.request
        try:
            inputs = Inputs.read(request.parameters, self.writer.store.read)
            generation = self.engine.generate(request.parameters, run, inputs)
            if run.step_s is not None:
                self.step_s = lately(self.step_s, run.step_s)
            outputs = self.writer.write(request, generation)
        except DeviceLost:
            raise
        except ServingError as error:
            _logger.warning("%s failed: %s", request.id, error)
            return Outcome(Status.FAILED, error=Failure(error.code, str(error), error.retryable))
        except Exception:
            _logger.exception("%s failed for a reason of our own", request.id)
            return _failed(
                GenerationFailed.code, "The replica met an error of its own; its log says which."
            )
        timings = Timings(
            generation.encode_s,
            generation.denoise_s,
            generation.decode_s,
            generation.batch_mean,
        )
        return Outcome(Status.SUCCEEDED, outputs, tuple(generation.warnings), timings)

    def _lose_device(self, run: Run, lost: DeviceLost) -> None:
        """Give all runs up: the only one is to blame; of several each may be, so they run alone.

        The device reports a fault to whoever calls it next, which need not be who caused it.
        """
        request = run.request
        only = len(self.runs) == 1 and not self.device_lost
        self.device_lost = True
        self.stop_all(Stop.SUSPECT)
        _logger.critical("while it ran %s, attempt %d: %s", request.id, request.attempt, lost)
        if only:
            self._settlement.crash(request)
        else:
            self._settlement.hand_back(request, suspect=True)
        self.on_device_lost(f"{lost} (while it ran {request.id})")


def _failed(code: str, message: str) -> Outcome:
    return Outcome(Status.FAILED, error=Failure(code, message))
