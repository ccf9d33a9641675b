"""The settlement of a run: its outcome recorded, or its request handed back for another attempt.

Whatever must be recorded is insisted on, however long Redis is away: the work is done and must not
be lost. Does not know the engine, nor why a run ended as it did.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from redis.exceptions import RedisError

from routing.broker import Broker
from routing.claims import Claims, Moved
from routing.outcome import Outcome
from routing.record import Request

_RETRY_S: Final = (0.2, 0.5, 1.0, 2.0)
_Recorded = TypeVar("_Recorded")
_logger = logging.getLogger(__name__)


class Settlement:
    """Records how the runs of one replica end."""

    def __init__(self, claims: Claims, broker: Broker) -> None:
        """Record by `claims`; wake the replicas that requests are handed to by `broker`."""
        self._claims = claims
        self._broker = broker

    def finish(self, request: Request, outcome: Outcome) -> bool:
        """Record how an attempt ended; False where it was canceled or belongs to another by now."""
        return _insist(lambda: self._claims.finish(request, outcome))

    def hand_back(self, request: Request, *, suspect: bool = False) -> None:
        """Have a request run elsewhere, alone if it is suspected of what befell its replica."""
        self._wake(_insist(lambda: self._claims.hand_back(request, suspect=suspect)))

    def crash(self, request: Request) -> None:
        """Count a crash against a request, which runs elsewhere unless that was one too many."""
        self._wake(_insist(lambda: self._claims.move_crashed(request)))

    def return_stray(self, request: Request) -> None:
        """Hand back a request that does not run here.

        Raises:
            redis.RedisError: Redis did not answer; the record still says that it runs here.
        """
        self._wake(self._claims.hand_back(request))

    def _wake(self, move: Moved | None) -> None:
        if move:
            _logger.info(
                "%s handed back; attempt %d goes to %s", move.id, move.attempt, move.replica
            )
            self._broker.wake(move.replica, move.id, move.attempt)


def _insist(record: Callable[[], _Recorded]) -> _Recorded:
    tries = 0
    while True:
        try:
            return record()
        except RedisError as error:
            pause = _RETRY_S[min(tries, len(_RETRY_S) - 1)]
            _logger.warning("an outcome was not recorded, trying again in %g s: %s", pause, error)
            tries += 1
            time.sleep(pause)
