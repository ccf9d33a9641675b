"""A replica as others see it: what it says of itself, and what the registry adds.

Knows how a heartbeat looks in Redis (a hash of strings). Does not know who writes it, nor when it
expires: that is ``registry``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum


class ReplicaState(StrEnum):
    """Where a replica stands; only ``ready`` ones are in the rotation."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    GONE = "gone"


class Wish(StrEnum):
    """What an operator may want of a replica."""

    DRAIN = "drain"
    RESTART = "restart"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a replica says of itself, about once a second.

    Attributes:
        name: Its name, which is also the name of its queue.
        incarnation: One process of it; a later one sorts after an earlier one.
        node: Celery node name, to send it control commands.
        devices: Its device chunk, such as ``(2, 3)``.
        step_s: Seconds one denoising step takes, a moving mean; None before the first.
        memory_bytes: Memory its process holds.
        device_memory_bytes: Device memory it holds; None without such a device.
        stopping: Whether its process is about to end.
        error: Why it failed; kept through the next start, until it is ready.
    """

    name: str
    incarnation: str
    stage: int
    model: str
    state: ReplicaState
    node: str
    host: str
    pid: int
    devices: tuple[int, ...]
    device_kind: str
    capacity: int = 1
    started_at: float = 0.0
    step_s: float | None = None
    memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    stopping: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as the registry shows it: its last heartbeat, its line and its counters."""

    heartbeat: Heartbeat
    beat_at: float
    waiting: int
    running: int
    completed: int
    failed: int
    restarts: int

    @property
    def name(self) -> str:
        """Its name."""
        return self.heartbeat.name

    @property
    def state(self) -> ReplicaState:
        """Its state; ``gone`` once its heartbeat has expired."""
        return self.heartbeat.state


def heartbeat_fields(heartbeat: Heartbeat) -> dict[str, str]:
    """Return the fields of a heartbeat that the script which records it does not set itself."""
    fields = {
        name: json.dumps(value)
        for name, value in asdict(heartbeat).items()
        if name not in {"name", "incarnation", "stage", "state"} and (name != "error" or value)
    }
    return {**fields, "stopping": "1" if heartbeat.stopping else "0"}


def read_replica(
    mark: Mapping[str, str], expired: bool, waiting: int, running: int, totals: Mapping[str, str]
) -> Replica:
    """Read a replica as Redis holds it; an expired heartbeat makes it ``gone``."""
    plain = {
        "name": mark["name"],
        "incarnation": mark["incarnation"],
        "stage": int(mark["stage"]),
        "state": ReplicaState.GONE if expired else ReplicaState(mark["state"]),
        "stopping": mark["stopping"] == "1",
    }
    rest = {
        field: json.loads(mark[field])
        for field in Heartbeat.__dataclass_fields__
        if field not in plain and field in mark
    }
    return Replica(
        heartbeat=Heartbeat(**{**rest, **plain, "devices": tuple(rest["devices"])}),
        beat_at=float(mark["beat_at"]),
        waiting=waiting,
        running=running,
        completed=int(totals.get("completed", 0)),
        failed=int(totals.get("failed", 0)),
        restarts=int(totals.get("restarts", 0)),
    )
