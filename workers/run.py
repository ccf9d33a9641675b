"""A run: one claimed request while the engine works on it, and what may stop or change it.

It is what the engine talks to between two steps. Flags are set by other threads (control commands,
the reporter, the shutdown) and acted upon at the next step, so that no thread ever waits for
another.

Does not know Redis: the reporter carries its progress there and the record's wishes back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum

from PIL import Image

from routing.record import Request
from workers.engine.observer import Interrupted
from workers.images import encode_preview


class Stop(StrEnum):
    """Why a run ends before its time."""

    CANCELED = "canceled"
    TIMEOUT = "timeout"
    HAND_BACK = "hand_back"
    LOST = "lost"
    SUSPECT = "suspect"


class Run:
    """One claimed request in flight."""

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
        self._guidance: Mapping[str, float | None] = {}
        self._preview_every_s = preview_every_s
        self._preview: tuple[int, bytes] | None = None
        self._shown_at = -math.inf
        self._stop: Stop | None = None
        self._lock = threading.Lock()

    def stop(self, why: Stop) -> None:
        """Ask the run to end at its next step; the first reason given counts."""
        with self._lock:
            if self._stop is None:
                self._stop = why

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
        """Keep how it looks for the reporter to carry on; only the newest counts."""
        self._shown_at = self._clock()
        self._preview = step, encode_preview(picture)
        self._on_progress()

    def take_preview(self) -> tuple[int, bytes] | None:
        """Return the newest preview, its step and a JPEG, once."""
        preview, self._preview = self._preview, None
        return preview

    def on_step(self, step: int, steps: int) -> None:
        """Note that ``step`` of ``steps`` are done.

        Raises:
            Interrupted: It was asked to stop, or its time is over.
        """
        now = self._clock()
        if step > self.step:
            last = (now - self.moved_at) / (step - self.step)
            self.step_s = lately(self.step_s if self.step else None, last)
        self.step, self.steps, self.moved_at = step, steps, now
        self._on_progress()
        if self.timeout is not None and now - self._started > self.timeout:
            self.stop(Stop.TIMEOUT)
        if self._stop is not None:
            raise Interrupted(self._stop)


def lately(known_s: float | None, last_s: float) -> float:
    """Return the seconds that a step takes of late: a mean in which what is past weighs less."""
    return last_s if known_s is None else 0.7 * known_s + 0.3 * last_s
