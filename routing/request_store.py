"""The request store: the door's side of the record — submit, read, cancel, edit, remove.

Every change is one Lua script, so several API processes never see half of one. Does not know Celery
(``broker``), lists (``request_lists``), nor how a replica claims and ends a request (``claims``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from redis import Redis

from configs.errors import (
    Conflict,
    IdempotencyMismatch,
    NoReadyReplica,
    QueueFull,
    ServingError,
)
from routing.keys import Keys
from routing.lua import Scripts
from routing.parameters import Parameters
from routing.record import Priority, Request, number_field
from routing.request_lists import unknown_request
from routing.submission import Accepted, Limits, Submission

_UNKNOWN_ROOM_S: Final = 5.0
_LONGEST_ROOM_S: Final = 600.0


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
        limits: Limits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Accept requests within ``limits``.

        ``priority_age_s`` is the ageing rule: a high request counts as so many seconds older, a low
        one as so many younger, so that no low request waits for ever.
        """
        self._redis = redis
        self._keys = Keys(prefix)
        self._scripts = Scripts(redis, prefix)
        self._priority_age_s = priority_age_s
        self._limits = limits
        self._clock = clock

    def submit(self, new: Submission) -> Accepted:
        """Record a request on a ready replica of its stage, chosen by affinity key and policy.

        Raises:
            NoReadyReplica: No replica of the stage is in the rotation.
            QueueFull: As many requests wait as may; it says when to come back.
            IdempotencyMismatch: The key was used with another body.
        """
        now = self._clock()
        answer = self._scripts.call(
            "submit",
            new.id,
            new.stage,
            now,
            new.model,
            self._limits.policy,
            new.affinity_key,
            self._limits.per_replica,
            self._limits.per_stage,
            new.idempotency_key,
            new.fingerprint,
            self._score(now, new.priority),
            new.parameters.work(),
            fields={
                "parameters": json.dumps(new.parameters.to_json()),
                "priority": new.priority,
                "start_by": number_field(None if new.expires_in is None else now + new.expires_in),
                "timeout": number_field(new.timeout),
                "metadata": json.dumps(dict(new.metadata)),
                "webhook": new.webhook.to_text() if new.webhook else "",
                "warnings": json.dumps(list(new.warnings)),
            },
        )
        if answer[0] in {"created", "exists"}:
            return _accepted(answer)
        raise self._refusal(answer, new)

    def get(self, request_id: str) -> Request:
        """Return a record.

        Raises:
            NotFound: There is none, or it is past its retention.
        """
        found: Mapping[str, str] = self._redis.hgetall(self._keys.request(request_id))  # type: ignore[assignment]
        if not found or found.get("hidden") == "1":
            raise unknown_request(request_id)
        return Request.from_hash(found)

    def exists(self, request_id: str) -> bool:
        """Whether there is such a record, for clients to see."""
        return bool(self._redis.zscore(self._keys.requests, request_id))

    def preview(self, request_id: str) -> str | None:
        """Return the newest preview of a running request, base64 of a JPEG; None without one."""
        found: str | None = self._redis.get(self._keys.preview(request_id))  # type: ignore[assignment]
        return found

    def cancel(self, request_id: str, *, remove: bool = False) -> CancelAnswer:
        """Cancel a request; with ``remove`` its record goes too, now or when its replica lets go.

        Raises:
            NotFound: There is no such record.
        """
        answer = self._scripts.call("cancel", request_id, self._clock(), "1" if remove else "0")
        if answer[0] == "unknown":
            raise unknown_request(request_id)
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
            "work": str(parameters.work()),
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
            raise unknown_request(request.id)
        if answer[0] == "stale":
            raise Conflict(f"Request {request.id} changed meanwhile; read it and edit it again.")
        return self.get(request.id)

    def remove(self, request_id: str) -> bool:
        """Remove a record that has ended; False where it has not, or is not there."""
        return bool(self._scripts.call("forget", request_id))

    def _refusal(self, answer: Sequence[str], new: Submission) -> ServingError:
        match answer[0]:
            case "mismatch":
                return IdempotencyMismatch(
                    f"Idempotency-Key {new.idempotency_key!r} was already used for request "
                    f"{answer[1]} with another body; send a new key with a new body.",
                    param="Idempotency-Key",
                )
            case "replica_full":
                return QueueFull(
                    f"Every ready replica of {new.model!r} has {self._limits.per_replica} "
                    "requests waiting; try again later.",
                    retry_after=_seconds_to_room(answer[1]),
                )
            case "stage_full":
                return QueueFull(
                    f"{self._limits.per_stage} requests wait for {new.model!r}; try again later.",
                    retry_after=_seconds_to_room(answer[1]),
                )
            case _:
                return NoReadyReplica(
                    f"No replica of {new.model!r} is ready; GET /v1/replicas tells their states.",
                    retry_after=5.0,
                )

    def _score(self, created_at: float, priority: Priority) -> float:
        return created_at + priority.rank * self._priority_age_s


def _accepted(answer: Sequence[Any]) -> Accepted:
    word, pairs, rank, messages, waiting = answer
    return Accepted(
        request=Request.from_hash(dict(zip(pairs[::2], pairs[1::2], strict=True))),
        created=word == "created",
        place=None if rank is None else int(rank) + 1,
        needs_wake_up=int(messages) < int(waiting),
    )


def _seconds_to_room(found: str) -> float:
    seconds = float(found) if found else _UNKNOWN_ROOM_S
    return min(max(1.0, seconds), _LONGEST_ROOM_S)
