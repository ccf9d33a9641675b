"""A request: its record, its states, and how it is submitted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from configs.parameters import Parameters
from routing.keys import RECORD, read_hash


class Status(StrEnum):
    """Where a request stands: queued → running → one of the terminal ones."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    EXPIRED = "expired"


ACTIVE = frozenset({Status.QUEUED, Status.RUNNING})
TERMINAL = frozenset(Status) - ACTIVE


@dataclass(frozen=True, slots=True)
class Output:
    """One file a request produced; ``name`` is its place in the output store.

    ``num_frames`` and ``fps`` are None unless it is a video.
    """

    name: str
    media_type: str
    width: int
    height: int
    seed: int
    bytes: int
    sha256: str
    num_frames: int | None = None
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended without outputs."""

    code: str
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each part of a run; None where that part was not reached.

    ``store_s`` is encoding the files and writing them. ``batch_mean`` is the mean number of
    requests that shared a denoiser call of this one.
    """

    encode_s: float | None = None
    denoise_s: float | None = None
    decode_s: float | None = None
    batch_mean: float | None = None
    store_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: what a replica records at the end of a claim."""

    status: Status
    outputs: tuple[Output, ...] = ()
    warnings: tuple[str, ...] = ()
    timings: Timings = Timings()
    error: Failure | None = None
    step: int = 0
    steps: int = 0

    def to_fields(self) -> dict[str, str]:
        """Return the fields of the record that this outcome sets, status left out."""
        fields = {
            "step": str(self.step),
            "steps": str(self.steps),
            "outputs": json.dumps([asdict(output) for output in self.outputs]),
            "warnings": json.dumps(list(self.warnings)),
            "timings": json.dumps(asdict(self.timings)),
        }
        if self.error is not None:
            fields["error"] = json.dumps(asdict(self.error))
        return fields


WEBHOOK_EVENTS: Final = ("started", "progress", "ended")


class Priority(StrEnum):
    """Which of the waiting requests of a replica goes first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


DEFAULT_PRIORITY: Final = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where a client is told of which events, and whether it was told of the end.

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
        """Return what the record keeps of it."""
        return json.dumps({"url": self.url, "events": list(self.events)})


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
        crashes: How often its replica crashed while it ran.
        revision: One more after each edit; guards edits against each other.
        owner: Incarnation of the replica that runs it; empty otherwise.
        priority: Its class in the queue.
        score: Its place in the queue of its replica: lower goes first.
        start_by: Moment after which it must not start any more.
        timeout: Seconds it may run.
        step: Denoising steps done, of ``steps``; both 0 before the first is known.
        step_s: Seconds a step takes, from the steps seen so far.
        cancel: Whether it was told to stop and has not yet.
        affinity_key: Requests of one key go to one replica, as far as they can; empty for none.
        webhook: What its client wants to be told, and where; None for nothing.
        client: Whose it is, for fairness among clients; empty for nobody's.
        counted_at: Moment from which its place in the queue counts; None for `created_at`.
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
    client: str = ""
    counted_at: float | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.status in TERMINAL

    @classmethod
    def from_hash(cls, stored: Mapping[str, str]) -> Self:
        """Read a record as Redis holds it."""
        values = read_hash(RECORD, stored)
        told = {name: values.pop(f"webhook_{name}") for name in ("tries", "delivered_at", "error")}
        wanted, error = values["webhook"], values["error"]
        read: dict[str, Any] = {
            "parameters": Parameters.from_json(values["parameters"]),
            "status": Status(values["status"]),
            "priority": Priority(values["priority"]),
            "timings": Timings(**values["timings"]),
            "outputs": tuple(Output(**output) for output in values["outputs"]),
            "warnings": tuple(values["warnings"]),
            "error": Failure(**error) if error else None,
            "webhook": Webhook(wanted["url"], tuple(wanted["events"]), **told) if wanted else None,
        }
        return cls(**{**values, **read})


def number_field(value: float | None) -> str:
    """Write a number as the record holds it: with all its digits, and nothing for None."""
    return "" if value is None else repr(float(value))


@dataclass(frozen=True, slots=True)
class Submission:
    """A valid request on its way in.

    Attributes:
        id: A new id of ours.
        expires_in: Seconds within which it must start; None for no limit.
        timeout: Seconds it may run; None for no limit.
        idempotency_key: The client's own name for this submit; empty for none.
        fingerprint: Hash of the body, to tell the same submit from another with the same key.
        affinity_key: Requests of one key go to one replica, as far as they can; empty for none.
        client: Whose it is, for fairness among clients; empty for nobody's.
    """

    id: str
    stage: int
    model: str
    parameters: Parameters
    priority: Priority = DEFAULT_PRIORITY
    expires_in: float | None = None
    timeout: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    webhook: Webhook | None = None
    warnings: tuple[str, ...] = ()
    idempotency_key: str = ""
    fingerprint: str = "-"
    affinity_key: str = ""
    client: str = ""


class Accepted(NamedTuple):
    """An accepted request, so that its answer needs no further look at Redis.

    Attributes:
        request: As it was recorded.
        created: Whether it is new; False where its idempotency key was used before.
        queue_position: In the queue of its replica, 1 for the next; None unless it waits.
        needs_wake_up: Whether the replica's queue holds fewer messages than requests wait.
    """

    request: Request
    created: bool
    queue_position: int | None
    needs_wake_up: bool
