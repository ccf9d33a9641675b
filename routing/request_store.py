"""The request store: the door's side of the record — submit, read, list, cancel, edit, remove.

Every change is one Lua script, so several API processes never see half of one. Does not know Celery
(``broker``), nor how a replica claims and ends a request (``claims``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from redis import Redis

from configs.errors import (
    Conflict,
    IdempotencyMismatch,
    NoReadyReplica,
    NotFound,
    QueueFull,
)
from routing.keys import Keys
from routing.lua import Scripts
from routing.parameters import Parameters
from routing.record import Priority, Request, Status, number_field


@dataclass(frozen=True, slots=True)
class Submission:
    """A valid request on its way in.

    Attributes:
        id: A new id of ours.
        expires_in: Seconds within which it must start; None for no limit.
        timeout: Seconds it may run; None for no limit.
        idempotency_key: The client's own name for this submit; empty for none.
        fingerprint: Hash of the body, to tell the same submit from another with the same key.
    """

    id: str
    stage: int
    model: str
    parameters: Parameters
    priority: Priority = Priority.NORMAL
    expires_in: float | None = None
    timeout: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    idempotency_key: str = ""
    fingerprint: str = "-"


class CancelAnswer(StrEnum):
    """What a cancel met: a waiting request, a running one, or one that had ended."""

    CANCELED = "canceled"
    STOPPING = "stopping"
    TERMINAL = "terminal"


class RequestStore:
    """Reads and changes records for the door."""

    def __init__(
        self,
        redis: Redis,
        prefix: str,
        priority_age_s: float,
        max_waiting: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep at most ``max_waiting`` requests in one replica's line.

        ``priority_age_s`` is the ageing rule: a high request counts as so many seconds older, a low
        one as so many younger, so that no low request waits for ever.
        """
        self._redis = redis
        self._keys = Keys(prefix)
        self._scripts = Scripts(redis, prefix)
        self._priority_age_s = priority_age_s
        self._max_waiting = max_waiting
        self._clock = clock

    def submit(self, new: Submission) -> tuple[Request, bool]:
        """Record a request on the next ready replica of its stage; return it and whether it is new.

        Raises:
            NoReadyReplica: No replica of the stage is in the rotation.
            QueueFull: Every line of the stage is as long as it may be.
            IdempotencyMismatch: The key was used with another body.
        """
        now = self._clock()
        answer = self._scripts.call(
            "submit",
            new.id,
            new.stage,
            now,
            self._score(now, new.priority),
            self._max_waiting,
            new.idempotency_key,
            new.fingerprint,
            fields={
                "model": new.model,
                "parameters": json.dumps(new.parameters.to_json()),
                "priority": new.priority,
                "start_by": number_field(None if new.expires_in is None else now + new.expires_in),
                "timeout": number_field(new.timeout),
                "metadata": json.dumps(dict(new.metadata)),
                "warnings": json.dumps(list(new.warnings)),
            },
        )
        match answer[0]:
            case "created":
                return self.get(new.id), True
            case "exists":
                return self.get(answer[1]), False
            case "mismatch":
                raise IdempotencyMismatch(
                    f"Idempotency-Key {new.idempotency_key!r} was already used for request "
                    f"{answer[1]} with another body; send a new key with a new body.",
                    param="Idempotency-Key",
                )
            case "full":
                raise QueueFull(
                    f"Every ready replica of {new.model!r} has {self._max_waiting} requests "
                    "waiting; try again later.",
                )
            case _:
                raise NoReadyReplica(
                    f"No replica of {new.model!r} is ready; GET /v1/replicas tells their states.",
                    retry_after=5.0,
                )

    def get(self, request_id: str) -> Request:
        """Return a record.

        Raises:
            NotFound: There is none, or it is past its retention.
        """
        found: Mapping[str, str] = self._redis.hgetall(self._keys.request(request_id))  # type: ignore[assignment]
        if not found or found.get("hidden") == "1":
            raise _unknown(request_id)
        return Request.from_hash(found)

    def preview(self, request_id: str) -> str | None:
        """Return the newest preview of a running request, base64 of a JPEG; None without one."""
        found: str | None = self._redis.get(self._keys.preview(request_id))  # type: ignore[assignment]
        return found

    def queue_position(self, request: Request) -> int | None:
        """Return its place in its replica's line, 1 for the next; None unless it waits."""
        if request.status is not Status.QUEUED:
            return None
        rank = self._redis.zrank(self._keys.waiting(request.replica), request.id)
        return None if rank is None else int(rank) + 1  # type: ignore[arg-type]

    def newest(self, after: str | None = None) -> Iterator[Request]:
        """Yield records from the newest on, or from the one below ``after`` on.

        Raises:
            NotFound: There is no record ``after``.
        """
        start = 0
        if after is not None:
            rank = self._redis.zrevrank(self._keys.requests, after)
            if rank is None:
                raise _unknown(after, param="after")
            start = int(rank) + 1  # type: ignore[arg-type]
        while True:
            ids: list[str] = self._redis.zrevrange(self._keys.requests, start, start + 99)  # type: ignore[assignment]
            if not ids:
                return
            pipeline = self._redis.pipeline(transaction=False)
            for request_id in ids:
                pipeline.hgetall(self._keys.request(request_id))
            yield from (Request.from_hash(found) for found in pipeline.execute() if found)
            start += len(ids)

    def cancel(self, request_id: str, *, remove: bool = False) -> CancelAnswer:
        """Cancel a request; with ``remove`` its record goes too, now or when its replica lets go.

        Raises:
            NotFound: There is no such record.
        """
        answer = self._scripts.call("cancel", request_id, self._clock(), "1" if remove else "0")
        if answer[0] == "unknown":
            raise _unknown(request_id)
        return CancelAnswer(answer[0])

    def edit(
        self,
        request: Request,
        parameters: Parameters,
        priority: Priority,
        *,
        timeout: float | None,
        expires_in: float | None = None,
    ) -> Request:
        """Change a request that still stands as it was read; return it changed.

        Raises:
            NotFound: It is gone.
            Conflict: It changed since it was read; read it and edit it again.
        """
        fields: dict[str, Any] = {
            "parameters": json.dumps(parameters.to_json()),
            "priority": priority,
            "timeout": number_field(timeout),
        }
        if expires_in is not None:
            fields["start_by"] = number_field(request.created_at + expires_in)
        score = (
            "" if priority is request.priority else repr(self._score(request.created_at, priority))
        )
        answer = self._scripts.call(
            "edit", request.id, request.revision, request.status, score, fields=fields
        )
        if answer[0] == "unknown":
            raise _unknown(request.id)
        if answer[0] == "stale":
            raise Conflict(f"Request {request.id} changed meanwhile; read it and edit it again.")
        return self.get(request.id)

    def remove(self, request_id: str) -> bool:
        """Remove a record that has ended; False where it has not, or is not there."""
        return bool(self._scripts.call("forget", request_id))

    def ended_before(self, moment: float, limit: int = 100) -> list[str]:
        """Return up to ``limit`` ids of records that ended before ``moment``, the oldest first."""
        ids: list[str] = self._redis.zrangebyscore(
            self._keys.finished, "-inf", moment, start=0, num=limit
        )  # type: ignore[assignment]
        return ids

    def _score(self, created_at: float, priority: Priority) -> float:
        return created_at + priority.rank * self._priority_age_s


def _unknown(request_id: str, param: str = "id") -> NotFound:
    return NotFound(
        f"There is no request {request_id!r}: the id is wrong, or its record is past its "
        "retention.",
        param=param,
    )
