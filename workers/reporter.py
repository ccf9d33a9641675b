"""The reporter: one thread that carries the progress of runs to their records, and wishes back.

The denoising thread only sets numbers; it never waits for Redis. While Redis is away the runs go on
and the reporter tries again.

Does not know the engine, nor how a run ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from redis.exceptions import RedisError

from configs.errors import NotFound
from routing.claims import Claims
from routing.record import Request
from workers.run import Run, Stop

_SOONEST_S = 0.05  # between two reports of a run whose steps are faster than anyone looks
_LATEST_S = 0.5  # a wish in the record is seen this soon even if its control command got lost
_logger = logging.getLogger(__name__)


class Reporter:
    """Reports on the runs that ``runs`` returns."""

    def __init__(
        self, claims: Claims, read: Callable[[str], Request], runs: Callable[[], Collection[Run]]
    ) -> None:
        """Report nothing before :meth:`start`; ``read`` returns a record by its id."""
        self._claims = claims
        self._read = read
        self._runs = runs
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reporter", daemon=True)

    def start(self) -> None:
        """Start reporting."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting; returns once the thread has ended."""
        self._stopped.set()
        self._news.set()
        self._thread.join(timeout=5)

    def wake(self) -> None:
        """Say that a run has moved or should be looked at."""
        self._news.set()

    def _loop(self) -> None:
        while not self._stopped.wait(_SOONEST_S):
            self._news.wait(_LATEST_S if self._runs() else None)
            self._news.clear()
            for run in list(self._runs()):
                self._report(run)

    def _report(self, run: Run) -> None:
        try:
            signals = self._claims.progress(run.request, run.step, run.steps, run.step_s)
            if signals is None:
                run.stop(Stop.LOST)
                return
            preview = run.take_preview()
            if preview is not None:
                self._claims.preview(run.request, *preview)
            if signals.cancel:
                run.stop(Stop.CANCELED)
            if signals.revision != run.request.revision:
                run.edit(self._read(run.request.id))
        except RedisError as error:
            _logger.warning("progress of %s was not recorded: %s", run.request.id, error)
        except NotFound:
            run.stop(Stop.CANCELED)  # removed by its client while it ran
