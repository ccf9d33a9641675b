"""Claims: a replica's side of the records. It takes the next request, reports on it, ends it.

Every call is fenced: by the replica's incarnation when it takes a request, by attempt and
incarnation after that. Whatever a replica does with a request that was given to another counts for
nothing.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from redis import Redis

from configs.settings import Settings
from routing.keys import Keys
from routing.lua import Scripts
from routing.request import Outcome, Request, number_field

_PREVIEW_KEPT_S = 3600
_PROGRESS_TOLD_S = 1.0


@dataclass(frozen=True, slots=True)
class Signals:
    """What the record tells a replica about a request it runs."""

    cancel: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A request that was given a new attempt in the queue of ``replica``."""

    id: str
    replica: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that a replica has taken, and whether it could take another one's next."""

    request: Request
    others_wait: bool


class Finished(IntEnum):
    """What became of an outcome."""

    NOT_OURS = 0
    RECORDED = 1
    OTHERS_WAIT = 2  # recorded, and the replica could take another one's request next


class MustRunAlone(Exception):
    """Raised where a request that was in a crash waits, or runs: it runs alone on its replica."""


class Claims:
    """Changes records on behalf of a replica, or of the sweep that stands in for a dead one."""

    def __init__(
        self, settings: Settings, redis: Redis, clock: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._keys = Keys(settings.redis_prefix)
        self._scripts = Scripts(redis, settings.redis_prefix)
        self._clock = clock

    def claim(self, replica: str, incarnation: str) -> Claim | None:
        """Take the first request of the replica's queue; None where nothing waits.

        Where that queue is empty it is the first of the stage that waits for another replica. One
        that can share steps with what runs there may overtake others, within MAX_OVERTAKEN.

        Raises:
            MustRunAlone: Something waits, and may not share the replica with what runs there now.
        """
        most = self._settings.max_overtaken
        answer = self._scripts.call("claim", replica, incarnation, self._clock(), most)
        if not answer:
            return None
        if answer == "alone":
            raise MustRunAlone
        pairs, others_wait = answer
        request = Request.from_hash(dict(zip(pairs[::2], pairs[1::2], strict=True)))
        return Claim(request, bool(others_wait))

    def progress(
        self, request: Request, step: int, steps: int, step_s: float | None
    ) -> Signals | None:
        """Record how far a claimed request is; None once the claim no longer holds."""
        answer = self._scripts.call(
            "progress",
            request.id,
            request.attempt,
            request.owner,
            step,
            steps,
            number_field(step_s),
            self._clock() + _PROGRESS_TOLD_S,
        )
        return Signals(cancel=answer[0] == "1", revision=int(answer[1])) if answer else None

    def preview(self, request: Request, step: int, jpeg: bytes) -> None:
        """Show how a claimed request looks after ``step``; nothing once the claim is lost."""
        picture = base64.b64encode(jpeg).decode()
        self._scripts.call(
            "preview",
            request.id,
            request.attempt,
            request.owner,
            step,
            picture,
            _PREVIEW_KEPT_S,
        )

    def finish(self, request: Request, outcome: Outcome) -> Finished:
        """Record how a claimed request ended, unless the claim no longer held.

        Nor where it was told to stop: then it is canceled, and its files are to be removed.
        """
        if request.warnings:
            # What was said at submit stays said.
            said = dict.fromkeys((*request.warnings, *outcome.warnings))
            outcome = replace(outcome, warnings=tuple(said))
        return Finished(
            self._scripts.call(
                "finish",
                request.id,
                request.attempt,
                request.owner,
                self._clock(),
                outcome.status,
                fields=outcome.to_fields(),
            )
        )

    def hand_back(self, request: Request, *, suspect: bool = False) -> Moved | None:
        """Give a claimed request up without blame; None where it ended or was no longer ours.

        A suspect may have broken its replica, as one of several: it runs alone from then on.
        """
        return self._requeue(request, request.owner, "suspect" if suspect else "none")

    def move_waiting(self, request: Request) -> Moved | None:
        """Move a waiting request to another ready replica; None without one, or if it started."""
        return self._requeue(request, "", "none")

    def move_crashed(self, request: Request) -> Moved | None:
        """Give a request another attempt that broke its replica; None where it ended by that."""
        return self._requeue(request, request.owner, "crash")

    def move_from_dead(self, request: Request) -> Moved | None:
        """Give a request another attempt whose process is gone; None where it ended by that.

        Nor where the process lives, whatever was read of it before.
        """
        return self._requeue(request, request.owner, "death")

    def expire(self) -> int:
        """End the waiting requests whose time to start is over; return how many there were."""
        return int(self._scripts.call("expire", self._clock()))

    def waiting_at(self, replica: str) -> list[Request]:
        """Return the requests in the queue of a replica, the next first."""
        ids: list[str] = self._redis.zrange(self._keys.waiting(replica), 0, -1)  # type: ignore[assignment]
        return read_requests(self._redis, self._keys, ids)

    def running_at(self, replica: str) -> list[Request]:
        """Return the requests a replica has claimed."""
        ids: set[str] = self._redis.smembers(self._keys.running(replica))  # type: ignore[assignment]
        return read_requests(self._redis, self._keys, sorted(ids))

    def _requeue(self, request: Request, owner: str, blame: str) -> Moved | None:
        now = self._clock()
        answer = self._scripts.call(
            "requeue",
            request.id,
            request.attempt,
            owner,
            now,
            blame,
            self._settings.max_attempts,
            self._settings.routing_policy,
            now + self._settings.affinity_patience_s,
        )
        if answer[0] != "queued":
            return None
        return Moved(request.id, answer[1], int(answer[2]))


def read_requests(redis: Redis, keys: Keys, ids: Sequence[str]) -> list[Request]:
    """Return the records of those ids that have one, asked for all at once."""
    pipeline = redis.pipeline(transaction=False)
    for request_id in ids:
        pipeline.hgetall(keys.request(request_id))
    return [*map(Request.from_hash, filter(None, pipeline.execute()))] if ids else []
