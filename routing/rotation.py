"""The rotation: which replicas take requests, as operators want it, and what moves with that.

Drain, restart and resume are written to the registry, which is what counts, and the replica is
told, which is only speed. Does not know HTTP, nor how a replica obeys.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from configs.errors import Conflict, NotFound
from routing.broker import Broker
from routing.claims import Claims
from routing.connection import renew_patience
from routing.replica import Registry, Replica, Wish

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Takes replicas out of the rotation and back into it."""

    claims: Claims
    registry: Registry
    broker: Broker

    def drain(self, name: str, drain_s: float) -> Replica:
        """Take a replica out of the rotation and move what waits there to the others.

        What runs there may go on for ``drain_s`` seconds and is then handed back.

        Raises:
            NotFound: There is no such replica.
        """
        self._ask(name, Wish.DRAIN, drain_s)
        self.move_waiting(name)
        return self.replica(name)

    def restart(self, name: str, drain_s: float) -> Replica:
        """Drain a replica and have its process end; whoever supervises it starts it again.

        Raises:
            NotFound: There is no such replica.
            Conflict: It has no process that could end: it is loading, failed or gone.
        """
        self._ask(name, Wish.RESTART, drain_s)
        self.move_waiting(name)
        return self.replica(name)

    def resume(self, name: str) -> Replica:
        """Let a replica back into the rotation.

        Raises:
            NotFound: There is no such replica.
        """
        self._ask(name, Wish.RESUME)
        for request in self.claims.waiting_at(name):
            # While it was drained it has taken the wake-ups of these, and left them where they are.
            self.broker.wake(name, request.id, request.attempt)
            renew_patience()
        return self.replica(name)

    def move_waiting(self, name: str) -> int:
        """Give the waiting requests of a replica to others of its stage; return how many moved."""
        moved = 0
        for request in self.claims.waiting_at(name):
            move = self.claims.move_waiting(request)
            if move is not None:
                self.broker.wake(move.replica, move.id, move.attempt)
                moved += 1
            # However many there are: what was answered so far shows that Redis is not away.
            renew_patience()
        if moved:
            _logger.info("moved %d waiting requests away from %s", moved, name)
        return moved

    def replica(self, name: str) -> Replica:
        """Return a replica.

        Raises:
            NotFound: There is no such replica.
        """
        replica = self.registry.get(name)
        if replica is None:
            raise _no_replica(name, self.registry.names())
        return replica

    def _ask(self, name: str, wish: Wish, drain_s: float = 0.0) -> None:
        answer = self.registry.ask(name, wish, drain_s)
        if answer == "unknown":
            raise _no_replica(name, self.registry.names())
        if answer != "done":
            raise Conflict(
                f"{name} is {answer}: there is no process of it that could end and be started "
                "again; wait until it is ready.",
                param="name",
            )
        replica = self.registry.get(name)
        if replica is not None:
            self.broker.beat(replica.heartbeat.node)


def _no_replica(name: str, known: list[str]) -> NotFound:
    return NotFound(
        f"There is no replica {name!r}; known are {', '.join(known) or 'none'}.", param="name"
    )
