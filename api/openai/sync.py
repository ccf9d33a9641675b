"""A request that one call submits and waits for to its end, as the synchronous calls do.

A client that closes its connection meanwhile cancels its request.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from flask import request as call
from redis.exceptions import RedisError

from api.requests.schema import RequestBodySchema
from api.requests.submit import new_request_id, submit_body
from api.requests.waiting import Client
from api.service import Service
from configs.errors import (
    GenerationError,
    RequestCanceled,
    RequestExpired,
    ServingError,
    Unavailable,
)
from routing.changes import Subscription
from routing.request import Failure, Request, Status

_logger = logging.getLogger(__name__)


# An end is told by the stream; this is how long one could stay unseen if the stream lost it.
_WAIT_S: Final = 30.0
_STORE_AWAY_S: Final = 30.0
_STORE_PAUSE_S: Final = 1.0
_RETRY_S: Final = 2.0


class ClientGone(ServingError):
    """Raised when the client of a waiting call has closed its connection; nobody reads it."""

    status: ClassVar[int] = 499
    code: ClassVar[str] = "client_gone"


@dataclass(slots=True)
class AwaitedRequest:
    """A request and the client that waits for it.

    Attributes:
        service: Where it is.
        request: As it was last seen.
        given: All fields of its body, those too that only the call itself reads.
        subscription: Wakes at its changes, and when its client goes.
        client: Who waits.
        outlives_client: Whether it goes on without the client.
        store_away_since: When Redis was first found not to answer, by the monotonic clock.
    """

    service: Service
    request: Request
    given: Mapping[str, Any]
    subscription: Subscription
    client: Client
    outlives_client: bool
    store_away_since: float | None = None

    def look(self, pause_s: float) -> bool:
        """Return True where it has ended; else wait for news, `pause_s` at most.

        Raises:
            ClientGone: Its client has closed the connection.
            Unavailable: This process is shutting down.
            redis.RedisError: Redis has not answered for half a minute.
        """
        try:
            self.request = self.service.records.get(self.request.id)
            self.store_away_since = None
        except RedisError:
            # The replica goes on meanwhile; a retry of the client's would make it all again.
            now = time.monotonic()
            self.store_away_since = self.store_away_since or now
            if now - self.store_away_since > _STORE_AWAY_S:
                raise
            pause_s = _STORE_PAUSE_S
        if self.request.is_terminal:
            return True
        if self.client.gone:
            raise ClientGone("The client has closed its connection.")
        if self.service.held_calls.closed:
            raise Unavailable("This API process is shutting down; retry.", retry_after=_RETRY_S)
        self.subscription.wait(pause_s)
        return False

    def until_success(self) -> Request:
        """Return the request once it has succeeded.

        Raises:
            GenerationError, RequestCanceled, RequestExpired: It ended otherwise.
        """
        while not self.look(_WAIT_S):
            pass
        _raise_unless_succeeded(self.request)
        return self.request

    def leave(self) -> None:
        """Cancel a request that has not ended: nobody waits for it any more."""
        if self.request.is_terminal or self.outlives_client:
            return
        try:
            self.service.router.cancel(self.request.id)
            _logger.info("%s is canceled: nobody waits for it any more", self.request.id)
        except (ServingError, RedisError) as error:
            _logger.warning("%s could not be canceled: %s", self.request.id, error)


@contextmanager
def awaited(
    service: Service,
    body: Mapping[str, Any],
    schema: RequestBodySchema,
    key: str = "",
    *,
    only_end: bool = True,
) -> Iterator[AwaitedRequest]:
    """Submit what a body asks for, and cancel it where it has not ended when the context does.

    With an idempotency key the request outlives its client: that is what the key is for. With
    `only_end` nothing but the end wakes who waits.

    Raises:
        TooManyWaits: As many calls are held as may be; nothing was submitted.
        ServingError: It was refused, as by :func:`submit_body`.
    """
    request_id = new_request_id()
    subscriptions: list[Subscription] = []

    def wake() -> None:
        for subscription in subscriptions:
            subscription.notify()

    with ExitStack() as stack:

        def hold(held_id: str) -> None:
            held = service.held_calls.hold(held_id, only_end=only_end)
            subscriptions.append(stack.enter_context(held))

        # The place to wait comes first: what is submitted must not be left alone.
        hold(request_id)
        client = stack.enter_context(service.clients.watching(_connection(), wake))
        accepted, given = submit_body(service, body, key=key, schema=schema, request_id=request_id)
        request = accepted.request
        if request.id != request_id:
            # An earlier call with the same key made it.
            hold(request.id)
        waiting = AwaitedRequest(service, request, given, subscriptions[-1], client, bool(key))
        stack.callback(waiting.leave)
        yield waiting


def _connection() -> socket.socket | None:
    found = call.environ.get("gunicorn.socket")
    return found if isinstance(found, socket.socket) else None


def _raise_unless_succeeded(request: Request) -> None:
    if request.status is Status.SUCCEEDED:
        return
    if request.status is Status.CANCELED:
        raise RequestCanceled(f"Request {request.id} was canceled.")
    # The record says whether another try may help, here as in what GET /v1/requests/{id} answers.
    failure = request.error or Failure("", "no reason is known")
    if request.status is Status.EXPIRED:
        raise RequestExpired(failure.message, retryable=failure.retryable)
    message = f"Request {request.id} failed: {failure.message}"
    raise GenerationError.of_code(failure.code, message, retryable=failure.retryable)
