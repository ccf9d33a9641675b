"""The router: what a client may do to a request, record first, message second.

Submit, cancel, update and removal all go the same road: the change is written to the record, which
is the truth, and then the replica that has the request is told, which is only speed.

Does not know HTTP, nor what the parameters mean.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from configs.parameters import Parameters
from configs.settings import Settings
from routing.broker import Broker
from routing.claims import Claims
from routing.outbox import Deliveries
from routing.outputs import LooseFolders, OutputStore
from routing.records import CancelAnswer, RequestLists, RequestStore, Unanswered
from routing.replica import Registry
from routing.request import Accepted, Limits, Priority, Request, Status, Submission
from routing.rotation import Rotation

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Router:
    """Routes requests to replicas and finds the replica that has one."""

    store: RequestStore
    lists: RequestLists
    claims: Claims
    registry: Registry
    rotation: Rotation
    broker: Broker
    outputs: OutputStore
    unanswered: Unanswered
    deliveries: Deliveries
    loose: LooseFolders

    @classmethod
    def open(cls, settings: Settings, redis: Redis, clock: Callable[[], float] = time.time) -> Self:
        """Put a router together from the settings and one connection."""
        prefix = settings.redis_prefix
        limits = Limits(
            policy=settings.routing_policy,
            per_replica=settings.max_waiting_per_replica,
            per_stage=settings.max_waiting_per_stage,
        )
        claims = Claims(redis, prefix, settings.max_attempts, settings.routing_policy, clock)
        registry = Registry(redis, prefix, settings.heartbeat_expiry_s, clock)
        broker = Broker(settings)
        return cls(
            store=RequestStore(redis, prefix, settings.priority_age_s, limits, clock),
            lists=RequestLists(redis, prefix),
            claims=claims,
            registry=registry,
            rotation=Rotation(claims, registry, broker),
            broker=broker,
            outputs=OutputStore(settings.outputs_url),
            unanswered=Unanswered(clock),
            deliveries=Deliveries(redis, prefix, clock),
            loose=LooseFolders(redis, prefix, clock),
        )

    def submit(self, new: Submission) -> Accepted:
        """Record a request on a ready replica and wake it.

        The record is what counts: where the wake-up does not get through, the replica finds the
        request by its heartbeat.

        Raises:
            NoReadyReplica, QueueFull, IdempotencyMismatch: As :meth:`RequestStore.submit`.
            redis.RedisError: Redis did not answer. What it may have recorded all the same is
                withdrawn by :meth:`withdraw`; with an idempotency key it stays, since the client
                finds it by that.
        """
        try:
            accepted = self.store.submit(new)
        except RedisError:
            self.unanswered.add(new.id, has_key=bool(new.idempotency_key))
            raise
        request = accepted.request
        if accepted.created and accepted.needs_wake_up:
            self.broker.wake(request.replica, request.id, request.attempt)
        return accepted

    def withdraw(self) -> None:
        """Remove what was recorded for submits whose answer got lost: their clients were told 503.

        Raises:
            redis.RedisError: Redis did not answer; the next call does it.
        """
        for submit in self.unanswered.all():
            try:
                recorded = self.store.exists(submit.id)
            except RedisError:
                self.unanswered.renew()
                raise
            if recorded and not submit.has_key:
                self.remove(submit.id)
                _logger.info("%s was withdrawn: its submit was answered with 503", submit.id)
            if not recorded and submit.is_old:
                self.outputs.remove(submit.id)  # its inputs were stored before it
            if recorded or submit.is_old:
                self.unanswered.discard(submit.id)

    def cancel(self, request_id: str) -> tuple[Request, CancelAnswer]:
        """Cancel a request wherever it is; return it as it stands then.

        Raises:
            NotFound: There is no such record.
        """
        answer = self.store.cancel(request_id)
        request = self.store.get(request_id)
        if answer is CancelAnswer.STOPPING:
            self._tell(request)
        return request, answer

    def update(
        self,
        request: Request,
        parameters: Parameters,
        priority: Priority,
        *,
        timeout: float | None,
        expires_in: float | None = None,
    ) -> Request:
        """Change a request as it was read, and tell its replica where it runs already.

        Raises:
            NotFound, Conflict: As :meth:`RequestStore.edit`.
        """
        changed = self.store.edit(
            request, parameters, priority, timeout=timeout, expires_in=expires_in
        )
        if changed.status is Status.RUNNING:
            node = self._node(changed.replica)
            if node:
                self.broker.update(node, changed.id, changed.attempt)
        return changed

    def remove(self, request_id: str) -> None:
        """Cancel a request if needed and remove its record and files.

        Raises:
            NotFound: There is no such record.
        """
        request = self.store.get(request_id)
        answer = self.store.cancel(request_id, remove=True)
        if answer is CancelAnswer.STOPPING:
            self._tell(request)
        self.outputs.remove(request_id)
        if answer is not CancelAnswer.STOPPING:
            # What a replica still writes until it stops is the sweep's, should it die over it.
            self.loose.strike(request_id)

    def _tell(self, request: Request) -> None:
        node = self._node(request.replica)
        if node:
            self.broker.cancel(node, request.id, request.attempt)

    def _node(self, name: str) -> str | None:
        replica = self.registry.get(name)
        return replica.heartbeat.node if replica else None
