"""A request on its way in: what is submitted, under which limits, and what an accepted one is.

Does not know how it is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from routing.parameters import Parameters
from routing.record import Priority, Request, Webhook


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
    """

    id: str
    stage: int
    model: str
    parameters: Parameters
    priority: Priority = Priority.NORMAL
    expires_in: float | None = None
    timeout: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    webhook: Webhook | None = None
    warnings: tuple[str, ...] = ()
    idempotency_key: str = ""
    fingerprint: str = "-"
    affinity_key: str = ""


class Accepted(NamedTuple):
    """An accepted request, so that its answer needs no further look at Redis.

    Attributes:
        request: As it was recorded.
        created: Whether it is new; False where its idempotency key was used before.
        place: In the line of its replica, 1 for the next; None unless it waits.
        needs_wake_up: Whether the replica's queue holds fewer messages than its line requests.
    """

    request: Request
    created: bool
    place: int | None
    needs_wake_up: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """How requests are spread, and how many may wait.

    Attributes:
        policy: ``round_robin`` or ``least_work``.
        per_replica: Requests that may wait in one replica's line.
        per_stage: Requests that may wait for all replicas of a stage.
    """

    policy: str = "round_robin"
    per_replica: int = 1000
    per_stage: int = 10_000
