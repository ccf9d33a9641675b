"""The failover sweep: what a dead or drained replica held goes to the living; the old is removed.

Idempotent, and under a lock in Redis that expires, so that every API process may run it and any of
them may die. All it does is fenced by attempt, so a replica that was only slow can do no harm
afterwards.

Does not know how replicas are started again: that is whoever supervises them.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kombu.exceptions import OperationalError
from redis import Redis
from redis.exceptions import RedisError

from routing.keys import Keys
from routing.replica import FORGET_AFTER_S, Replica, ReplicaState
from routing.router import Router

_LOCK_S = 30
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One sweep over all replicas, all ended records, and files without a record."""

    redis: Redis
    prefix: str
    router: Router
    retention_s: float
    clock: Callable[[], float] = time.time

    def run(self) -> bool:
        """Sweep once; False where another process is at it.

        Raises:
            redis.RedisError: Redis did not answer; the next sweep does the rest.
        """
        key, token = Keys(self.prefix).sweep, secrets.token_hex(8)
        if not self.redis.set(key, token, nx=True, ex=_LOCK_S):
            return False
        try:
            for replica in self.router.registry.all():
                self._relieve(replica)
            self.router.claims.expire()
            self._remove_old()
            for _ in range(self.router.deliveries.wakes_wanted()):
                self.router.broker.wake_webhooks()
        finally:
            if self.redis.get(key) == token:
                self.redis.delete(key)
        return True

    def _relieve(self, replica: Replica) -> None:
        running = self.router.claims.running_at(replica.name)
        alive = replica.state in {ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.LOADING}
        for request in running:
            if alive and request.owner == replica.heartbeat.incarnation:
                continue
            move = self.router.claims.move_crashed(request)
            if move:
                _logger.warning(
                    "%s died while it ran %s; attempt %d goes to %s",
                    replica.name, request.id, move.attempt, move.replica,
                )  # fmt: skip
                self.router.broker.wake(move.replica, move.id, move.attempt)
        if replica.waiting and replica.state is not ReplicaState.READY:
            self.router.rotation.move_waiting(replica.name)
        long_gone = self.clock() - replica.beat_at > FORGET_AFTER_S
        if long_gone and not replica.waiting and not running and not alive:
            self.router.registry.forget(replica.name)

    def _remove_old(self) -> None:
        for request_id in self.router.lists.ended_before(self.clock() - self.retention_s):
            if not self._remove_files(request_id):
                return
            self.router.store.remove(request_id)
        for request_id in self.router.loose.old():
            if not self.router.store.exists(request_id) and not self._remove_files(request_id):
                return
            self.router.loose.strike(request_id)

    def _remove_files(self, request_id: str) -> bool:
        """Remove them; False where the store does not: the next sweep tries, and this one goes on.

        A store that is away must not keep requests from those that can run them.
        """
        try:
            self.router.outputs.remove(request_id)
        except Exception as error:  # noqa: BLE001 - any file system may fail in its own way
            _logger.warning("the files of %s could not be removed: %s", request_id, error)
            return False
        return True


class Sweeper:
    """Runs the sweep again and again in a thread of its own.

    After a start, and after Redis was away, nobody could have written a heartbeat: from the moment
    that Redis answers, the sweep waits until every living replica has had the time to, or it would
    take them all for dead.
    """

    def __init__(self, sweep: Sweep, every_s: float, grace_s: float) -> None:
        """Sweep every ``every_s`` seconds, ``grace_s`` after a start or the end of an outage."""
        self._sweep = sweep
        self._every_s = every_s
        self._grace_s = grace_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start, once; each process calls it itself."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="sweep", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop after the sweep at hand."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=_LOCK_S)

    def _loop(self) -> None:
        pause_s, was_away = self._grace_s, False
        while not self._stopped.wait(pause_s):
            try:
                self._sweep.router.withdraw()
                if was_away:
                    self._sweep.redis.ping()
                    pause_s, was_away = self._grace_s, False
                else:
                    self._sweep.run()
                    pause_s = self._every_s
            except (RedisError, OperationalError, OSError) as error:
                _logger.warning("the sweep did not finish: %s", error)
                pause_s, was_away = self._every_s, True
            except Exception:
                # Whatever it is, a process without a sweep would look well and save nobody.
                _logger.exception("the sweep did not finish")
                pause_s = self._grace_s
