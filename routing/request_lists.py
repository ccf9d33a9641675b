"""The lists of requests: pages by state and model, and places in the line.

Each list is an index that the scripts keep, so a page costs as much as it shows, however many
records there are. Does not know how a record is changed (``request_store``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from redis import Redis

from configs.errors import NotFound
from routing.keys import Keys
from routing.outcome import Status
from routing.record import Request


class RequestLists:
    """Reads many records at a time."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        """Read the lists of one prefix."""
        self._redis = redis
        self._keys = Keys(prefix)

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
        listed = self._keys.listed(status, model)
        top: float | str = "+inf"
        if after is not None:
            score: Any = self._redis.zscore(self._keys.requests, after)
            if score is None:
                raise unknown_request(after, param="after")
            top = repr(float(score))
        start = 0
        while True:
            ids: list[str] = self._redis.zrevrangebyscore(
                listed, top, "-inf", start=start, num=at_once, withscores=False
            )  # type: ignore[assignment]
            for request in self._read(ids):
                # Of one moment, those after ``after`` in the list's own order were on its page.
                if after is not None and repr(request.created_at) == top and request.id >= after:
                    continue
                if status in {None, request.status}:  # it may have moved on between the two reads
                    yield request
            if len(ids) < at_once:
                return
            start += len(ids)

    def place(self, request: Request) -> int | None:
        """Return its place in its replica's line, 1 for the next; None unless it waits."""
        return self.places([request])[0]

    def places(self, requests: Sequence[Request]) -> list[int | None]:
        """Return each one's :meth:`place`, asked for all at once."""
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
            self._keys.finished, "-inf", moment, start=0, num=limit
        )  # type: ignore[assignment]
        return ids

    def _read(self, ids: list[str]) -> list[Request]:
        pipeline = self._redis.pipeline(transaction=False)
        for request_id in ids:
            pipeline.hgetall(self._keys.request(request_id))
        return [Request.from_hash(found) for found in pipeline.execute() if found] if ids else []


def unknown_request(request_id: str, param: str = "id") -> NotFound:
    """Return the error for an id that no record has."""
    return NotFound(
        f"There is no request {request_id!r}: the id is wrong, or its record is past its "
        "retention.",
        param=param,
    )
