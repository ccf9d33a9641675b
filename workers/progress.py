"""The progress of a run: what may stop or change it, and the thread that reports it."""

from __future__ import annotations

import io
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum

from PIL import Image
from redis.exceptions import RedisError

from configs.errors import NotFound
from routing.claims import Claims
from routing.request import Request
from workers.engine.progress import Interrupted

_PREVIEW_QUALITY = 75  # a few kilobytes
_logger = logging.getLogger(__name__)


class Stop(StrEnum):
    """Why a run ends before its time."""

    CANCELED = "canceled"
    TIMEOUT = "timeout"
    HAND_BACK = "hand_back"
    LOST = "lost"
    SUSPECT = "suspect"


class RunningRequest:
    """One claimed request in flight; the engine calls it between two steps.

    Flags are set by other threads and acted upon at the next step, so that no thread waits for
    another.

    Attributes:
        request: As it was read last.
        step: Denoising steps done, of ``steps``; both 0 before the first.
        step_s: Seconds that a step takes; None before the first.
        moved_at: When it last did a step, by the clock.
        timeout: Seconds that it may run; None for no limit.
        preview: The newest preview that was not reported yet, its step and a JPEG.
        storing: Whether the engine is done with it, and its outputs are on their way to the store.
    """

    def __init__(
        self,
        request: Request,
        on_progress: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        preview_every_s: float = 0.5,
    ) -> None:
        """Start the time it may run now; call ``on_progress`` after each step."""
        self.request = request
        self.step = 0
        self.steps = 0
        self.step_s: float | None = None
        self.moved_at = clock()
        self._on_progress = on_progress
        self._clock = clock
        self._started = clock()
        self.timeout = request.timeout
        self.preview: tuple[int, bytes] | None = None
        self.storing = False
        self._guidance: Mapping[str, float | None] = {}
        self._preview_every_s = preview_every_s
        self._shown_at = -math.inf
        self._stop: Stop | None = None
        self._lock = threading.Lock()

    def stop(self, why: Stop) -> None:
        """Ask the run to end at its next step; the first reason given counts."""
        with self._lock:
            if self._stop is None:
                self._stop = why

    def begin_storing(self) -> None:
        """Note that the engine is done with it."""
        self.storing, self.moved_at = True, self._clock()

    def edit(self, request: Request) -> None:
        """Take over what may change while it runs: guidance, preview and timeout."""
        new, old = request.parameters, self.request.parameters
        changed = dict(self._guidance)
        if new.guidance_scale != old.guidance_scale:
            changed["guidance_scale"] = new.guidance_scale
        if new.true_cfg_scale != old.true_cfg_scale:
            changed["true_cfg_scale"] = new.true_cfg_scale
        self._guidance = changed
        self.timeout = request.timeout
        self.request = request

    def guidance(self) -> Mapping[str, float | None]:
        """Return the scales that were changed while running, by the names of the parameters."""
        return self._guidance

    def wants_preview(self) -> bool:
        """Return whether the client wants to see it, and has not just seen it."""
        if not self.request.parameters.preview:
            return False
        return self._clock() - self._shown_at >= self._preview_every_s

    def on_preview(self, step: int, picture: Image.Image) -> None:
        """Keep how it looks for the reporter; only the newest counts."""
        self._shown_at = self._clock()
        file = io.BytesIO()
        picture.save(file, format="jpeg", quality=_PREVIEW_QUALITY)
        self.preview = step, file.getvalue()
        self._on_progress()

    def on_step(self, step: int, steps: int) -> None:
        """Note that ``step`` of ``steps`` are done.

        Raises:
            Interrupted: It was asked to stop, or its time is over.
        """
        now = self._clock()
        if step > self.step:
            last = (now - self.moved_at) / (step - self.step)
            self.step_s = moving_mean(self.step_s if self.step else None, last)
        self.step, self.steps, self.moved_at = step, steps, now
        self._on_progress()
        if self.timeout is not None and now - self._started > self.timeout:
            self.stop(Stop.TIMEOUT)
        if self._stop is not None:
            raise Interrupted(self._stop)


def moving_mean(known_s: float | None, last_s: float) -> float:
    """Return the mean seconds of a step, in which older steps weigh less."""
    return last_s if known_s is None else 0.7 * known_s + 0.3 * last_s


_SHORTEST_PAUSE_S = 0.05  # between two reports of a run whose steps are faster than anyone looks


_LATEST_S = 0.5  # a command in the record is seen this soon even if its message got lost


class Reporter:
    """Writes the progress of the runs to their records, and reads from these what clients want."""

    def __init__(
        self, claims: Claims, read: Callable[[str], Request], runs: Mapping[str, RunningRequest]
    ) -> None:
        """Report nothing before :meth:`start`; ``read`` returns a record by its id."""
        self._claims = claims
        self._read = read
        self._runs = runs
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting; returns once the thread has ended."""
        self._stopped.set()
        self._news.set()
        self._thread.join(timeout=5)

    def wake(self) -> None:
        """Say that a run has moved or that its record has changed."""
        self._news.set()

    def _loop(self) -> None:
        while not self._stopped.wait(_SHORTEST_PAUSE_S):
            self._news.wait(_LATEST_S if self._runs else None)
            self._news.clear()
            for run in list(self._runs.values()):
                self._report(run)

    def _report(self, run: RunningRequest) -> None:
        try:
            signals = self._claims.progress(run.request, run.step, run.steps, run.step_s)
            if signals is None:
                run.stop(Stop.LOST)
                return
            if run.preview is not None:
                preview, run.preview = run.preview, None
                self._claims.preview(run.request, *preview)
            if signals.cancel:
                run.stop(Stop.CANCELED)
            if signals.revision != run.request.revision:
                run.edit(self._read(run.request.id))
        except RedisError as error:
            _logger.warning("progress of %s was not recorded: %s", run.request.id, error)
        except NotFound:
            run.stop(Stop.CANCELED)  # removed by its client while it ran
