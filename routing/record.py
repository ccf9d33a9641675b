"""The request record: what a client asked for and what has become of it.

Knows how a record looks in Redis (a hash of strings) and as a frozen value. Does not know who
changes
it: that is ``request_store`` for the door and ``claims`` for the replicas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from routing.outcome import TERMINAL, Failure, Output, Status, Timings
from routing.parameters import Parameters

WEBHOOK_EVENTS = ("started", "progress", "ended")


class Priority(StrEnum):
    """Which of the waiting requests of a replica goes first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """-1 for high, 0 for normal, 1 for low."""
        return {"high": -1, "normal": 0, "low": 1}[self.value]


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where a client wants to be told of what, and whether it was told of the end.

    Attributes:
        url: Address the messages are posted to.
        events: ``started``, ``progress``, ``ended``.
        tries: How often the end was tried to be told.
        delivered_at: When it was; None as long as it was not.
        error: Why the last try failed.
    """

    url: str
    events: tuple[str, ...]
    tries: int = 0
    delivered_at: float | None = None
    error: str = ""

    def to_text(self) -> str:
        """Return what the record keeps of the client's wish."""
        return json.dumps({"url": self.url, "events": list(self.events)})

    @classmethod
    def from_hash(cls, data: Mapping[str, str]) -> Self | None:
        """Read it from a record; None where the client wants none."""
        if not data.get("webhook"):
            return None
        wanted = json.loads(data["webhook"])
        return cls(
            url=wanted["url"],
            events=tuple(wanted["events"]),
            tries=int(data.get("webhook_tries", "0")),
            delivered_at=_number(data.get("webhook_delivered_at")),
            error=data.get("webhook_error", ""),
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A record as it stood when it was read. Times are seconds since the epoch.

    Attributes:
        id: Our own id; never made of anything a client sent.
        stage: Stage it belongs to.
        model: Name of the model, as clients know it.
        parameters: What to generate, complete.
        status: Where it stands.
        replica: The replica that has it.
        attempt: 1, and one more after each move to another replica.
        crashes: How often its replica died while it ran.
        revision: One more after each edit; guards edits against each other.
        owner: Incarnation of the replica that runs it; empty otherwise.
        priority: Its class in the line.
        score: Its place in the line of its replica: lower goes first.
        start_by: Moment after which it must not start any more.
        timeout: Seconds it may run.
        step: Denoising steps done, of ``steps``; both 0 before the first is known.
        step_s: Seconds a step takes, from the steps seen so far.
        cancel: Whether it was told to stop and has not yet.
        affinity_key: Requests of one key go to one replica, as far as they can; empty for none.
        webhook: What its client wants to be told, and where; None for nothing.
    """

    id: str
    stage: int
    model: str
    parameters: Parameters
    status: Status
    replica: str
    attempt: int
    crashes: int
    revision: int
    owner: str
    priority: Priority
    score: float
    created_at: float
    started_at: float | None
    finished_at: float | None
    start_by: float | None
    timeout: float | None
    step: int
    steps: int
    step_s: float | None
    cancel: bool
    timings: Timings
    outputs: tuple[Output, ...]
    warnings: tuple[str, ...]
    error: Failure | None
    metadata: Mapping[str, str]
    affinity_key: str = ""
    webhook: Webhook | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.status in TERMINAL

    @classmethod
    def from_hash(cls, data: Mapping[str, str]) -> Self:
        """Read a record as Redis holds it."""
        return cls(
            id=data["id"],
            stage=int(data["stage"]),
            model=data["model"],
            parameters=Parameters.from_json(json.loads(data["parameters"])),
            status=Status(data["status"]),
            replica=data["replica"],
            attempt=int(data["attempt"]),
            crashes=int(data["crashes"]),
            revision=int(data["revision"]),
            owner=data.get("owner", ""),
            priority=Priority(data["priority"]),
            score=float(data["score"]),
            created_at=float(data["created_at"]),
            started_at=_number(data.get("started_at")),
            finished_at=_number(data.get("finished_at")),
            start_by=_number(data.get("start_by")),
            timeout=_number(data.get("timeout")),
            step=int(data.get("step", "0")),
            steps=int(data.get("steps", "0")),
            step_s=_number(data.get("step_s")),
            cancel=data.get("cancel") == "1",
            timings=Timings(**json.loads(data.get("timings", "{}"))),
            outputs=tuple(Output(**output) for output in json.loads(data.get("outputs", "[]"))),
            warnings=tuple(json.loads(data.get("warnings", "[]"))),
            error=Failure(**json.loads(data["error"])) if data.get("error") else None,
            metadata=json.loads(data.get("metadata", "{}")),
            affinity_key=data.get("affinity_key", ""),
            webhook=Webhook.from_hash(data),
        )


def number_field(value: float | None) -> str:
    """Write a number as the record holds it: with all its digits, and nothing for None."""
    return "" if value is None else repr(float(value))


def _number(text: str | None) -> float | None:
    return float(text) if text else None
