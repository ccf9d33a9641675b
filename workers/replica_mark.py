"""The mark of a replica: what this process says of itself with each heartbeat.

Knows its state and the reason it failed for; does not know why a state changes.
"""

from __future__ import annotations

import os
import secrets
import socket
import time

import psutil

from configs.devices import Machine
from configs.stages import ReplicaPlan
from routing.replica import Heartbeat, ReplicaState


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
        """Say that it can not go on, and why."""
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
