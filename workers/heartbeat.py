"""The heartbeat: one thread that says about once a second that this replica lives, and how."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from redis.exceptions import RedisError

from configs.devices import Machine
from configs.stage_config import ReplicaPlan
from routing.replica import DrainCommand, Heartbeat, HeartbeatAnswer, Registry, ReplicaState

_logger = logging.getLogger(__name__)


class ReplicaMark:
    """What is told of a replica, kept up to date by whoever changes it.

    Attributes:
        incarnation: Name of this process among those of the replica; a later one sorts after it.
        node: Its Celery node name.
        state: Where it is in its life.
        stopping: Whether it takes nothing more, whatever an operator says.
        error: Why it failed, for whoever reads the registry.
    """

    def __init__(self, plan: ReplicaPlan, machine: Machine) -> None:
        """Begin a life, in which the pipeline is loaded first."""
        self._plan = plan
        self._machine = machine
        self._started_at = time.time()
        self._process = psutil.Process()
        self.incarnation = f"{int(self._started_at * 1000):013d}-{secrets.token_hex(4)}"
        self.node = f"{plan.name}@{socket.gethostname()}"
        self.state = ReplicaState.LOADING
        self.stopping = False
        self.error: str | None = None

    def leave(self) -> None:
        """Take the replica out of the rotation, for good."""
        self.stopping, self.state = True, ReplicaState.DRAINING

    def fail(self, error: str) -> None:
        """Say that it cannot go on, and why."""
        self.state, self.error = ReplicaState.FAILED, error

    def taken(self, step_s: float | None, device_memory_bytes: int | None) -> Heartbeat:
        """Return the heartbeat of this moment."""
        plan, stage = self._plan, self._plan.stage
        return Heartbeat(
            name=plan.name,
            incarnation=self.incarnation,
            stage=stage.stage_id,
            model=stage.model_name,
            state=self.state,
            node=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=plan.devices,
            device_kind=self._machine.kind_for(stage),
            capacity=stage.engine_args.max_num_seqs,
            started_at=self._started_at,
            step_s=step_s,
            memory_bytes=self._process.memory_info().rss,
            device_memory_bytes=device_memory_bytes,
            stopping=self.stopping,
            error=self.error,
        )


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
    heed: Callable[[DrainCommand | None], None]
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

    def heartbeat_now(self) -> None:
        """Write a mark without waiting for the next turn; safe in a signal handler."""
        self._now.set()

    def stop(self) -> None:
        """Stop, with a last mark that says how the process ends."""
        self._stopped.set()
        self._now.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        try:
            self._registry.record(self._mark())
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
                    # A thread that hangs in a kernel cannot be ended in any gentler way.
                    os.kill(os.getpid(), signal.SIGKILL)

    def _beat(self) -> None:
        try:
            standing = self._registry.record(self._mark())
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

    def _look_for_lost(self, standing: HeartbeatAnswer) -> None:
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
