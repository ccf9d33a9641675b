"""The heartbeat: one thread that says about once a second that this replica lives, and how."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from typing import Protocol

import psutil
from redis.exceptions import RedisError

from configs.machine import Machine
from configs.stage_config import ReplicaPlan
from routing.replica import DrainCommand, Heartbeat, HeartbeatAnswer, Registry, ReplicaState

_logger = logging.getLogger(__name__)


class ReplicaLife:
    """Where this replica is in its life.

    Attributes:
        incarnation: Name of this process among those of the replica; a later one sorts after it.
        node: Its Celery node name.
        state: As the registry has it from the next heartbeat on.
        stopping: Whether it takes nothing more, whatever an operator says.
        error: Why it failed.
        lasting: Whether a next process would fail as well.
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
        self.lasting = False
        self._doing: tuple[str, int | None, int | None] | None = None

    def tell(self, activity: str, done: int | None = None, total: int | None = None) -> None:
        """Say what is done until it is ready, with the bytes of a download."""
        self._doing = (activity, done, total)

    def leave(self) -> None:
        """Take the replica out of the rotation, for good."""
        self.stopping, self.state = True, ReplicaState.DRAINING

    def fail(self, error: str, *, lasting: bool = False) -> None:
        """Say that it cannot go on, and why."""
        self.state, self.error, self.lasting = ReplicaState.FAILED, error, lasting

    def heartbeat(self, step_s: float | None, device_memory_bytes: int | None) -> Heartbeat:
        plan, stage = self._plan, self._plan.stage
        loading = self.state is ReplicaState.LOADING
        activity, done, total = (loading and self._doing) or (None, None, None)
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
            lasting=self.lasting,
            activity=activity,
            downloaded_bytes=done,
            download_bytes=total,
        )


class HeartbeatSource(Protocol):
    """What sends the heartbeats, and hears their answers."""

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of this moment."""

    def is_stuck(self) -> bool:
        """Tell whether the next heartbeat is the last, after which this process is killed."""

    def has_room(self) -> bool:
        """Tell whether another request could be claimed now."""

    def wake_self(self, times: int) -> None:
        """Send so many wake-ups, which got lost while requests waited and there was room."""

    def return_orphaned_claims(self) -> None:
        """Hand back what runs here by the records alone; may raise RedisError."""

    def obey(self, command: DrainCommand | None) -> None:
        """Do what an operator wants; called after each heartbeat."""

    def superseded(self) -> None:
        """End: a newer process has taken the replica's name."""


class HeartbeatThread:
    """Sends a heartbeat every ``every_s`` seconds."""

    def __init__(self, registry: Registry, source: HeartbeatSource, every_s: float) -> None:
        """Send nothing before :meth:`start`."""
        self._registry = registry
        self._source = source
        self._every_s = every_s
        self._idle_heartbeats = 0
        self._now = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Send the first heartbeat, then go on in a thread of its own."""
        self._send()
        self._thread.start()

    def send_now(self) -> None:
        """Send a heartbeat without waiting for the next turn; safe in a signal handler."""
        self._now.set()

    def stop(self) -> None:
        """Stop, with a last heartbeat that says how the process ends."""
        self._stopped.set()
        self._now.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        try:
            self._registry.record(self._source.heartbeat())
        except RedisError as error:
            _logger.warning("the last heartbeat was not recorded and will expire: %s", error)

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._now.wait(self._every_s)
            self._now.clear()
            if not self._stopped.is_set():
                stuck = self._source.is_stuck()
                self._send()
                if stuck:
                    # A thread that hangs in a kernel cannot be ended in any gentler way.
                    os.kill(os.getpid(), signal.SIGKILL)

    def _send(self) -> None:
        try:
            answer = self._registry.record(self._source.heartbeat())
            if not answer.superseded:
                self._source.return_orphaned_claims()
        except RedisError as error:
            _logger.warning("the heartbeat was not recorded: %s", error)
            return
        if answer.superseded:
            self._stopped.set()
            self._source.superseded()
        else:
            self._source.obey(answer.drain)
            self._make_up_for_lost_wake_ups(answer)

    def _make_up_for_lost_wake_ups(self, answer: HeartbeatAnswer) -> None:
        idle = (
            answer.state is ReplicaState.READY
            and (answer.unannounced > 0 or answer.elsewhere > 0)
            and self._source.has_room()
        )
        self._idle_heartbeats = self._idle_heartbeats + 1 if idle else 0
        # At the second one only: a wake-up may be on its way just now.
        if self._idle_heartbeats < 2:
            return
        self._idle_heartbeats = 0
        if answer.unannounced > 0:
            _logger.warning(
                "%d requests wait while there is room, and %d wake-ups got lost; sent again",
                answer.waiting,
                answer.unannounced,
            )
        # For all of its own: one at a time would cost two heartbeats for each. Who takes one of
        # another's is told whether there are more.
        self._source.wake_self(max(answer.unannounced, 1))
