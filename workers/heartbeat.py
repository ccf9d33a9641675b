"""The heartbeat: one thread that says about once a second that this replica lives, and how.

It also wakes its own replica when requests wait while it is idle: wake-ups that got lost (a worker
that died between taking a message and claiming its request, an API process that died between moving
requests and telling) cost seconds, never a request.

Does not know requests beyond how many wait.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from routing.registry import Drain, Registry, Standing
from routing.replica import Heartbeat, ReplicaState

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reactions:
    """What a heartbeat asks its replica, and what it has it do.

    Attributes:
        stuck: Asked before each beat; the beat after a True is the last, and ends the process.
        has_room: Whether the replica could take another request now.
        wake: Called when requests waited while there was room, at two beats in a row, with how
            many messages for them are missing.
        return_strays: Called after each beat; may raise RedisError.
        heed: Called after each beat with what an operator wants of the replica.
        superseded: Called once when a newer process has taken the replica's name.
    """

    stuck: Callable[[], bool]
    has_room: Callable[[], bool]
    wake: Callable[[int], None]
    return_strays: Callable[[], None]
    heed: Callable[[Drain | None], None]
    superseded: Callable[[], None]


class HeartbeatThread:
    """Writes the mark that ``mark`` returns, every ``every_s`` seconds."""

    def __init__(
        self,
        registry: Registry,
        mark: Callable[[], Heartbeat],
        every_s: float,
        reactions: Reactions,
    ) -> None:
        """Write to ``registry``, and nothing before :meth:`start`."""
        self._registry = registry
        self._mark = mark
        self._every_s = every_s
        self._replica = reactions
        self._idle_beats = 0
        self._now = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first mark, then go on in a thread of its own."""
        self._beat()
        self._thread.start()

    def beat_now(self) -> None:
        """Write a mark without waiting for the next turn; safe in a signal handler."""
        self._now.set()

    def stop(self) -> None:
        """Stop, with a last mark that says how the process ends."""
        self._stopped.set()
        self._now.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        try:
            self._registry.beat(self._mark())
        except RedisError as error:
            _logger.warning("the last mark was not recorded, it expires by itself: %s", error)

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._now.wait(self._every_s)
            self._now.clear()
            if not self._stopped.is_set():
                stuck = self._replica.stuck()
                self._beat()
                if stuck:
                    # A thread that hangs in a kernel can not be ended in any gentler way.
                    os.kill(os.getpid(), signal.SIGKILL)

    def _beat(self) -> None:
        try:
            standing = self._registry.beat(self._mark())
            if not standing.superseded:
                self._replica.return_strays()
        except RedisError as error:
            _logger.warning("the heartbeat was not recorded: %s", error)
            return
        if standing.superseded:
            self._stopped.set()
            self._replica.superseded()
        else:
            self._replica.heed(standing.drain)
            self._look_for_lost(standing)

    def _look_for_lost(self, standing: Standing) -> None:
        idle = (
            standing.state is ReplicaState.READY
            and standing.unannounced > 0
            and self._replica.has_room()
        )
        self._idle_beats = self._idle_beats + 1 if idle else 0
        if self._idle_beats >= 2:
            _logger.warning(
                "%d requests wait while there is room, and %d wake-ups got lost; waking up",
                standing.waiting,
                standing.unannounced,
            )
            self._idle_beats = 0
            # For all of them: one at a time would cost two beats for each.
            self._replica.wake(standing.unannounced)
