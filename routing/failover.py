"""The failover sweep: what a dead or drained replica held goes to the living; the old is removed.

Idempotent, and under a lock in Redis that expires, so that every API process may run it and any of
them may die. All it does is fenced by attempt, so a replica that was only slow can do no harm
afterwards.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable

from kombu.exceptions import OperationalError
from redis import Redis
from redis.exceptions import RedisError

from configs.settings import Settings
from routing.broker import Broker
from routing.claims import Claims
from routing.keys import Keys
from routing.outbox import Outbox
from routing.outputs import OrphanedOutputs, OutputStore
from routing.records import Records
from routing.replica import Registry, Replica, ReplicaState
from routing.router import Router

_LOCK_S = 30
_logger = logging.getLogger(__name__)


class Sweep:
    """One sweep over all replicas, all ended records, and files without a record."""

    def __init__(
        self,
        settings: Settings,
        redis: Redis,
        router: Router,
        broker: Broker,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._retention_s = settings.retention_s
        self._redis = redis
        self._key = Keys(settings.redis_prefix).sweep()
        self._router = router
        self._broker = broker
        self._clock = clock
        self._records = Records(settings, redis, clock)
        self._claims = Claims(settings, redis, clock)
        self._registry = Registry(settings, redis, clock)
        self._outbox = Outbox(settings, redis, clock)
        self._outputs = OutputStore(settings.outputs_url)
        self._orphans = OrphanedOutputs(settings, redis, clock)

    def run(self) -> bool:
        """Sweep once; False where another process is at it.

        Raises:
            redis.RedisError: Redis did not answer; the next sweep does the rest.
        """
        token = secrets.token_hex(8)
        if not self._redis.set(self._key, token, nx=True, ex=_LOCK_S):
            return False
        try:
            for replica in self._registry.all():
                self._relieve(replica)
            self._claims.expire()
            self._remove_old()
            for _ in range(self._outbox.wakes_wanted()):
                self._broker.wake_webhooks()
        finally:
            if self._redis.get(self._key) == token:
                self._redis.delete(self._key)
        return True

    def withdraw(self) -> None:
        """Do :meth:`Router.withdraw`, which each process does for its own clients."""
        self._router.withdraw()

    def ping(self) -> None:
        """Ask whether Redis is back; raises redis.RedisError as long as it is not."""
        self._redis.ping()

    def _relieve(self, replica: Replica) -> None:
        running = self._claims.running_at(replica.name)
        alive = replica.state in {ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.LOADING}
        for request in running:
            if not alive or request.owner != replica.heartbeat.incarnation:
                self._router.move_crashed(request)
        if replica.waiting and replica.state is not ReplicaState.READY:
            self._router.move_waiting(replica.name)
        long_gone = self._clock() - replica.heartbeat_at > replica.heartbeat.kept_s
        if long_gone and not replica.waiting and not running and not alive:
            self._registry.forget(replica.name)

    def _remove_old(self) -> None:
        for request_id in self._records.ended_before(self._clock() - self._retention_s):
            if not self._remove_files(request_id):
                return
            self._records.remove(request_id)
        for request_id in self._orphans.old():
            if not self._records.exists(request_id) and not self._remove_files(request_id):
                return
            self._orphans.strike(request_id)

    def _remove_files(self, request_id: str) -> bool:
        """Remove them; False where the store does not: the next sweep tries, and this one goes on.

        A store that is away must not keep requests from those that can run them.
        """
        try:
            self._outputs.remove(request_id)
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
                self._sweep.withdraw()
                if was_away:
                    self._sweep.ping()
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
