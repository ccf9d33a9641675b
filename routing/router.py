"""The router: what clients and operators do to requests and replicas, record first, message second.

Every change is written to Redis, which counts, and then the replica is told, which is only speed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from redis import Redis
from redis.exceptions import RedisError

from configs.errors import Conflict, NoReadyReplica, OutputWriteFailed, StoreUnavailable
from configs.parameters import Parameters
from configs.settings import Settings
from routing.broker import Broker
from routing.claims import Claims
from routing.connection import renew_patience
from routing.outputs import OrphanedOutputs, OutputStore
from routing.records import CancelAnswer, Records
from routing.replica import Command, Registry, Replica, not_ready, unknown_replica
from routing.request import Accepted, Priority, Request, Status, Submission

_RETRY_S: Final = 2.0
_LOST_AFTER_S: Final = 120.0  # a slow network, or a Redis that hung, delivers a command this late
_MOST_LOST: Final = 10_000
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LostSubmit:
    """One submit: its id, whether its client can find it by a key, whether to give it up."""

    id: str
    has_key: bool
    is_old: bool


class LostSubmits:
    """Submits of this process whose answer got lost: Redis may have recorded them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, bool]] = {}

    def add(self, request_id: str, *, has_key: bool) -> None:
        """Remember a submit; the oldest is forgotten where there are too many."""
        with self._lock:
            self._known[request_id] = (self._clock(), has_key)
            while len(self._known) > _MOST_LOST:
                del self._known[next(iter(self._known))]

    def discard(self, request_id: str) -> None:
        """Forget a submit."""
        with self._lock:
            self._known.pop(request_id, None)

    def renew(self) -> None:
        """Count all from now: Redis was away, and gets to what it was sent when it is back."""
        with self._lock:
            now = self._clock()
            self._known = {each: (now, has_key) for each, (_, has_key) in self._known.items()}

    def all(self) -> list[LostSubmit]:
        """Return those that may have been recorded; an old one will not be any more."""
        with self._lock:
            oldest = self._clock() - _LOST_AFTER_S
            return [
                LostSubmit(request_id, has_key, since < oldest)
                for request_id, (since, has_key) in self._known.items()
            ]


class Router:
    """Routes requests to replicas, and takes replicas out of the rotation and back into it."""

    def __init__(
        self,
        settings: Settings,
        redis: Redis,
        broker: Broker,
        clock: Callable[[], float] = time.time,
        lost: LostSubmits | None = None,
    ) -> None:
        """Tell replicas by ``broker``; ``lost`` keeps the submits whose answer got lost."""
        self._records = Records(settings, redis, clock)
        self._claims = Claims(settings, redis, clock)
        self._registry = Registry(settings, redis, clock)
        self._outputs = OutputStore(settings.outputs_url)
        self._orphans = OrphanedOutputs(settings, redis, clock)
        self._lost = lost or LostSubmits(clock)
        self._broker = broker

    def submit(self, new: Submission, files: Mapping[str, bytes] | None = None) -> Accepted:
        """Store the input ``files`` by name, record a request on a ready replica, and wake it.

        The record is what counts: where the wake-up does not get through, the replica finds the
        request by its heartbeat.

        Raises:
            NoReadyReplica, QueueFull, IdempotencyMismatch: As :meth:`Records.submit`.
            StoreUnavailable: The files could not be written.
            redis.RedisError: Redis did not answer. What it may have recorded all the same is
                withdrawn by :meth:`withdraw`; with an idempotency key it stays, since the client
                finds it by that.
        """
        files = files or {}
        with self.stored(new.id, files):
            try:
                accepted = self._records.submit(new)
            except NoReadyReplica as refused:
                why = not_ready(new.stage, new.model, self._registry.all())
                raise NoReadyReplica(
                    f"{why[0].upper()}{why[1:]}; see GET /v1/replicas.",
                    retry_after=refused.retry_after,
                ) from None
            except RedisError:
                self._lost.add(new.id, has_key=bool(new.idempotency_key))
                raise
        request = accepted.request
        if accepted.created and accepted.needs_wake_up:
            self._broker.wake(request.replica, request.id, request.attempt)
        if files and not accepted.created:  # the request of that key has its own
            self._outputs.remove(new.id)
            self._orphans.strike(new.id)
        return accepted

    def withdraw(self) -> None:
        """Remove what was recorded for submits whose answer got lost: their clients were told 503.

        Raises:
            redis.RedisError: Redis did not answer; the next call does it.
        """
        for submit in self._lost.all():
            try:
                recorded = self._records.exists(submit.id)
            except RedisError:
                self._lost.renew()
                raise
            if recorded and not submit.has_key:
                self.remove(submit.id)
                _logger.info("%s was withdrawn: its submit was answered with 503", submit.id)
            if not recorded and submit.is_old:
                self._outputs.remove(submit.id)  # its inputs were stored before it
            if recorded or submit.is_old:
                self._lost.discard(submit.id)

    @contextmanager
    def stored(self, request_id: str, files: Mapping[str, bytes]) -> Iterator[None]:
        """Store files before what refers to them; where that fails they are removed again.

        Not where Redis did not answer, since what refers to them may be recorded: they are removed
        with the request, or by :meth:`withdraw`. Should this process die, the sweep does it.

        Raises:
            StoreUnavailable: They could not be written.
            redis.RedisError: Redis did not answer.
        """
        if not files:
            yield
            return
        self._orphans.note(request_id)
        written = list[str]()
        try:
            for name, data in files.items():
                self._outputs.write(name, data)
                written.append(name)
            yield
        except RedisError:
            raise
        except BaseException as error:
            # What went wrong first is what the client is told; what stays is the sweep's.
            with suppress(OSError, RedisError):
                for name in written:
                    self._outputs.remove_file(name)
                self._orphans.strike(request_id)
            if isinstance(error, OutputWriteFailed):
                raise StoreUnavailable(
                    "The input images could not be stored and nothing was recorded; send the "
                    "request again.",
                    retry_after=_RETRY_S,
                ) from error
            raise

    def cancel(self, request_id: str) -> tuple[Request, CancelAnswer]:
        """Cancel a request wherever it is; return it as it stands then.

        Raises:
            NotFound: There is no such record.
        """
        answer = self._records.cancel(request_id)
        request = self._records.get(request_id)
        if answer is CancelAnswer.STOPPING:
            self._tell(request, self._broker.cancel)
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
            NotFound, Conflict: As :meth:`Records.edit`.
        """
        changed = self._records.edit(
            request, parameters, priority, timeout=timeout, expires_in=expires_in
        )
        if changed.status is Status.RUNNING:
            self._tell(changed, self._broker.update)
        return changed

    def remove(self, request_id: str) -> None:
        """Cancel a request if needed and remove its record and files.

        Raises:
            NotFound: There is no such record.
        """
        request = self._records.get(request_id)
        answer = self._records.cancel(request_id, remove=True)
        if answer is CancelAnswer.STOPPING:
            self._tell(request, self._broker.cancel)
        self._outputs.remove(request_id)
        if answer is not CancelAnswer.STOPPING:
            # What a replica still writes until it stops is the sweep's, should it die over it.
            self._orphans.strike(request_id)

    def drain(self, name: str, drain_s: float) -> Replica:
        """Take a replica out of the rotation and move what waits there to the others.

        What runs there may go on for ``drain_s`` seconds and is then handed back.

        Raises:
            NotFound: There is no such replica.
        """
        self._command(name, Command.DRAIN, drain_s)
        self.move_waiting(name)
        return self._registry.find(name)

    def restart(self, name: str, drain_s: float) -> Replica:
        """Drain a replica and have its process end; whoever supervises it starts it again.

        Raises:
            NotFound: There is no such replica.
            Conflict: It has no process that could end: it is loading, failed or gone.
        """
        self._command(name, Command.RESTART, drain_s)
        self.move_waiting(name)
        return self._registry.find(name)

    def resume(self, name: str) -> Replica:
        """Let a replica back into the rotation.

        Raises:
            NotFound: There is no such replica.
        """
        self._command(name, Command.RESUME)
        self._broker.wake(name, "-", 0)  # requests may wait for other replicas
        for request in self._claims.waiting_at(name):
            # While it was drained it has taken the wake-ups of these, and left them where they are.
            self._broker.wake(name, request.id, request.attempt)
            renew_patience()
        return self._registry.find(name)

    def move_waiting(self, name: str) -> int:
        """Give the waiting requests of a replica to others of its stage; return how many moved."""
        moved = 0
        for request in self._claims.waiting_at(name):
            if move := self._claims.move_waiting(request):
                self._broker.wake(move.replica, move.id, move.attempt)
                moved += 1
            # However many there are: what was answered so far shows that Redis is not away.
            renew_patience()
        if moved:
            _logger.info("moved %d waiting requests away from %s", moved, name)
        return moved

    def move_crashed(self, request: Request) -> None:
        """Give a request whose replica died to another, unless it crashed too often."""
        if move := self._claims.move_from_dead(request):
            _logger.warning(
                "%s crashed while it ran %s; attempt %d goes to %s",
                request.replica, request.id, move.attempt, move.replica,
            )  # fmt: skip
            self._broker.wake(move.replica, move.id, move.attempt)

    def _command(self, name: str, command: Command, drain_s: float = 0.0) -> None:
        answer = self._registry.command(name, command, drain_s)
        if answer == "unknown":
            raise unknown_replica(name, self._registry.names())
        if answer != "done":
            raise Conflict(
                f"{name} is {answer} and has no process to restart; wait until it is ready.",
                param="name",
            )
        if replica := self._registry.get(name):
            self._broker.ask_heartbeat(replica.heartbeat.node)

    def _tell(self, request: Request, send: Callable[[str, str, int], object]) -> None:
        if replica := self._registry.get(request.replica):
            send(replica.heartbeat.node, request.id, request.attempt)
