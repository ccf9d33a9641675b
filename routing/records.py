"""Records as clients see them: submit, read, list, edit, cancel, remove."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from redis import Redis

from configs.errors import (
    Conflict,
    IdempotencyMismatch,
    NoReadyReplica,
    NotFound,
    QueueFull,
    ServingError,
)
from configs.parameters import Parameters
from configs.settings import Settings
from routing.claims import read_requests
from routing.keys import Keys
from routing.lua import Scripts
from routing.request import Accepted, Priority, Request, Status, Submission, number_field

_UNKNOWN_ROOM_S: Final = 5.0


_LONGEST_ROOM_S: Final = 600.0


# A high request counts as so many times PRIORITY_AGE_S older, a low one as so many times younger:
# so no low request waits for ever.
_AGES: Final = {Priority.HIGH: -1, Priority.NORMAL: 0, Priority.LOW: 1}


class CancelAnswer(StrEnum):
    """What a cancel met: a waiting request, a running one, or one that had ended."""

    CANCELED = "canceled"
    STOPPING = "stopping"
    TERMINAL = "terminal"


class Records:
    """Reads and changes records for clients."""

    def __init__(
        self, settings: Settings, redis: Redis, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._keys = Keys(settings.redis_prefix)
        self._scripts = Scripts(redis, settings.redis_prefix)
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
            self._settings.routing_policy,
            new.affinity_key,
            self._settings.max_waiting_per_replica,
            self._settings.max_waiting_per_stage,
            new.idempotency_key,
            new.fingerprint,
            self._score(now, new.priority),
            new.parameters.work(),
            new.client,
            self._settings.priority_age_s,
            fields={
                "parameters": json.dumps(new.parameters.to_json()),
                "kind": new.parameters.kind,
                "shares": new.parameters.shares(),
                "priority": new.priority,
                "start_by": number_field(None if new.expires_in is None else now + new.expires_in),
                "timeout": number_field(new.timeout),
                "held_until": number_field(
                    now + self._settings.affinity_patience_s if new.affinity_key else None
                ),
                "metadata": json.dumps(dict(new.metadata)),
                "webhook": new.webhook.to_text() if new.webhook else "",
                "warnings": json.dumps(list(new.warnings)),
            },
        )
        if answer[0] not in {"created", "exists"}:
            raise self._refusal(answer, new)
        word, pairs, rank, messages, waiting = answer
        return Accepted(
            request=Request.from_hash(dict(zip(pairs[::2], pairs[1::2], strict=True))),
            created=word == "created",
            queue_position=None if rank is None else int(rank) + 1,
            needs_wake_up=int(messages) < int(waiting),
        )

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
        return bool(self._redis.zscore(self._keys.requests(), request_id))

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
            "kind": parameters.kind,
            "shares": parameters.shares(),
            "priority": priority,
            "timeout": number_field(timeout),
            "work": str(parameters.work()),
        }
        if expires_in is not None:
            fields["start_by"] = number_field(request.created_at + expires_in)
        score = (
            ""
            if priority is request.priority
            else repr(self._score(request.counted_at or request.created_at, priority))
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

    def newest(
        self,
        after: str | None = None,
        *,
        status: Status | None = None,
        model: str | None = None,
        at_once: int = 100,
    ) -> Iterator[Request]:
        """Yield records from the newest on, or from the one below ``after`` on.

        ``after`` need not be in the list itself any more: it may have changed its state since.

        Raises:
            NotFound: There is no record ``after``.
        """
        for request in self._walk(self._list_of(status, model), after, at_once):
            if status in {None, request.status}:  # it may have moved on between the two reads
                yield request

    def of_kind(
        self,
        kind: str,
        after: str | None = None,
        *,
        oldest_first: bool = False,
        at_once: int = 100,
    ) -> Iterator[Request]:
        """Yield records of one kind of output, ``image`` or ``video``, as :meth:`newest` does.

        Raises:
            NotFound: There is no record ``after``.
        """
        return self._walk(self._keys.by_kind(kind), after, at_once, oldest_first=oldest_first)

    def _walk(
        self, listed: str, after: str | None, at_once: int, *, oldest_first: bool = False
    ) -> Iterator[Request]:
        """Read the records of a list, ``at_once`` at a time."""
        edge: float | str = "-inf" if oldest_first else "+inf"
        if after is not None:
            score: Any = self._redis.zscore(self._keys.requests(), after)
            if score is None:
                raise unknown_request(after, param="after")
            edge = repr(float(score))
        start = 0
        while True:
            ids: list[str] = self._redis.zrange(
                listed,
                edge,
                "+inf" if oldest_first else "-inf",
                desc=not oldest_first,
                byscore=True,
                offset=start,
                num=at_once,
            )  # type: ignore[assignment]
            for request in read_requests(self._redis, self._keys, ids):
                # Of one moment, those before ``after`` in the list's own order were on its page.
                if after is not None and repr(request.created_at) == edge:
                    shown = request.id <= after if oldest_first else request.id >= after
                    if shown:
                        continue
                yield request
            if len(ids) < at_once:
                return
            start += len(ids)

    def queue_position(self, request: Request) -> int | None:
        """Return its place in its replica's queue, 1 for the next; None unless it waits."""
        return self.queue_positions([request])[0]

    def queue_positions(self, requests: Sequence[Request]) -> list[int | None]:
        """Return the :meth:`queue_position` of each, asked for all at once."""
        waiting = [request for request in requests if request.status is Status.QUEUED]
        pipeline = self._redis.pipeline(transaction=False)
        for request in waiting:
            pipeline.zrank(self._keys.waiting(request.replica), request.id)
        ranks = dict(
            zip((r.id for r in waiting), pipeline.execute() if waiting else [], strict=True)
        )
        found = (ranks.get(request.id) for request in requests)
        return [None if rank is None else int(rank) + 1 for rank in found]

    def ended_before(self, moment: float, limit: int = 100) -> list[str]:
        """Return up to ``limit`` ids of records that ended before ``moment``, the oldest first."""
        ids: list[str] = self._redis.zrangebyscore(
            self._keys.finished(), "-inf", moment, start=0, num=limit
        )  # type: ignore[assignment]
        return ids

    def _list_of(self, status: Status | None, model: str | None) -> str:
        keys = self._keys
        if status is None:
            return keys.requests() if model is None else keys.by_model(model)
        return keys.by_status(status) if model is None else keys.by_status_and_model(status, model)

    def _refusal(self, answer: Sequence[str], new: Submission) -> ServingError:
        limits = self._settings
        match answer[0]:
            case "mismatch":
                return IdempotencyMismatch(
                    f"Idempotency-Key {new.idempotency_key!r} was already used for request "
                    f"{answer[1]} with another body; send a new key with a new body.",
                    param="Idempotency-Key",
                )
            case "replica_full":
                return QueueFull(
                    f"All queues of {new.model!r} are full: {limits.max_waiting_per_replica} "
                    "requests wait for each ready replica; retry later.",
                    retry_after=_seconds_to_room(answer[1]),
                )
            case "stage_full":
                return QueueFull(
                    f"The queue of {new.model!r} is full: {limits.max_waiting_per_stage} requests "
                    "wait; retry later.",
                    retry_after=_seconds_to_room(answer[1]),
                )
            case _:
                return NoReadyReplica(
                    f"No replica of {new.model!r} is ready; see GET /v1/replicas.",
                    retry_after=5.0,
                )

    def _score(self, created_at: float, priority: Priority) -> float:
        return created_at + _AGES[priority] * self._settings.priority_age_s


def unknown_request(request_id: str, param: str = "id") -> NotFound:
    """Return the error for an id that no record has."""
    return NotFound(
        f"There is no request {request_id!r}: the id is wrong, or its record is past its "
        "retention.",
        param=param,
    )


def _seconds_to_room(found: str) -> float:
    seconds = float(found) if found else _UNKNOWN_ROOM_S
    return min(max(1.0, seconds), _LONGEST_ROOM_S)
