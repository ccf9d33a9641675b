"""The outbox: webhook deliveries, each entered in the same step as the change that it tells of.

A delivery stays until it is settled, so none is lost with the process that would have sent it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from redis import Redis

from configs.settings import Settings
from routing.broker import WEBHOOK_QUEUE
from routing.keys import Keys
from routing.lua import Scripts
from routing.request import number_field

_LEASE_S: Final = 60.0


_MOST_WAKES: Final = 8


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message that is to be sent.

    Attributes:
        request_id: The request it is about.
        event: ``started``, ``progress`` or ``ended``.
        tries: 1 at the first try.
        since: Moment of the first try, seconds since the epoch.
    """

    request_id: str
    event: str
    tries: int
    since: float


class Outbox:
    """The deliveries that are due, in the order they are."""

    def __init__(
        self, settings: Settings, redis: Redis, clock: Callable[[], float] = time.time
    ) -> None:
        keys = Keys(settings.redis_prefix)
        self._redis = redis
        self._key = keys.deliveries()
        self._queue = keys.queue(WEBHOOK_QUEUE)
        self._scripts = Scripts(redis, settings.redis_prefix)
        self._clock = clock

    def due(self) -> int:
        """Return how many are due now.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        return int(self._redis.zcount(self._key, "-inf", self._clock()))

    def wakes_wanted(self) -> int:
        """Return how many wake-ups to send: one for each that is due, less those under way.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        due = self.due()
        return min(due, _MOST_WAKES) - int(self._redis.llen(self._queue)) if due else 0

    def take(self) -> Delivery | None:
        """Take the first that is due; unless it is settled it is due again in a minute.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        taken = self._scripts.call("outbox_take", self._clock(), _LEASE_S)
        if not taken:
            return None
        return Delivery(taken[0], taken[1], int(taken[2]), float(taken[3]))

    def delivered(self, delivery: Delivery) -> None:
        """Settle one that arrived."""
        self._settle(delivery, None, self._clock(), "")

    def failed(self, delivery: Delivery, fault: str, again_in_s: float | None) -> None:
        """Settle one that did not arrive: try again so much later, or never."""
        again = None if again_in_s is None else self._clock() + again_in_s
        self._settle(delivery, again, None, fault)

    def _settle(
        self, delivery: Delivery, again: float | None, delivered: float | None, fault: str
    ) -> None:
        self._scripts.call(
            "outbox_settle",
            delivery.request_id,
            delivery.event,
            number_field(again),
            number_field(delivered),
            fault,
        )
