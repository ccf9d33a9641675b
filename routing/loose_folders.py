"""Loose folders: those of the output store that may have no record, noted before they become so.

Files and records can not change together, and a process may die between the two. So an id is noted
before the first file of a request is stored and when a record is removed, and struck out once it is
recorded, or its files are gone. What stays noted is found without listing the store, which costs
time and money where that holds many objects, and nothing else in the store is ever touched.

Does not know the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from redis import Redis

from routing.keys import Keys

# Longer than any submit takes, and than a replica needs to let go of a request that was removed.
LOOSE_AFTER_S: Final = 3600.0


class LooseFolders:
    """The ids that were noted, each with the moment of that."""

    def __init__(self, redis: Redis, prefix: str, clock: Callable[[], float] = time.time) -> None:
        """Keep them under one key prefix."""
        self._redis = redis
        self._key = Keys(prefix).loose
        self._clock = clock

    def note(self, request_id: str) -> None:
        """Note an id; the scripts strike it out when it is recorded, and note what they remove.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        self._redis.zadd(self._key, {request_id: self._clock()})

    def strike(self, request_id: str) -> None:
        """Strike an id out: it has no files, or a record.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        self._redis.zrem(self._key, request_id)

    def old(self, limit: int = 100) -> list[str]:
        """Return up to `limit` ids that were noted an hour ago or more, the oldest first.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        ids: list[str] = self._redis.zrangebyscore(
            self._key, "-inf", self._clock() - LOOSE_AFTER_S, start=0, num=limit
        )  # type: ignore[assignment]
        return ids
