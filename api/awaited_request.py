"""A request that one call submits and waits for to its end: the road of the synchronous calls.

A client that closes its connection meanwhile cancels its request. Does not know how the end is
shown.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from flask import request as call
from redis.exceptions import RedisError

from api.client_watch import Client
from api.request_schema import RequestBodySchema
from api.service import Service
from api.submission import new_request_id, submit_body
from configs.errors import (
    GenerationError,
    RequestCanceled,
    RequestExpired,
    ServingError,
    Unavailable,
)
from routing.changes import Subscription
from routing.record import Request, Status

# An end is told by the stream; this is how long one could stay unseen if the stream lost it.
_LOOK_S: Final = 30.0
_STORE_AWAY_S: Final = 30.0
_STORE_PAUSE_S: Final = 1.0
_RETRY_S: Final = 2.0
_logger = logging.getLogger(__name__)


class ClientGone(ServingError):
    """Raised when the client of a waiting call has closed its connection; nobody reads it."""

    status: ClassVar[int] = 499
    code: ClassVar[str] = "client_gone"


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that succeeded, and all fields of its body."""

    request: Request
    given: Mapping[str, Any]


def run_to_end(
    service: Service, body: Mapping[str, Any], schema: RequestBodySchema, key: str = ""
) -> Ended:
    """Submit what a body asks for and return the request once it has succeeded.

    With an idempotency key the request outlives its client: that is what the key is for.

    Raises:
        TooManyWaits: As many calls are held as may be; nothing was submitted.
        GenerationError, RequestCanceled, RequestExpired: It ended otherwise.
        ServingError: It was refused, as by :func:`submit_body`.
    """
    request_id = new_request_id()
    # The place to wait comes first: what is submitted must not be left alone.
    with (
        service.held_calls.hold(request_id, only_end=True) as subscription,
        service.clients.watching(_connection(), subscription.notify) as client,
    ):
        submitted = submit_body(service, body, key=key, schema=schema, request_id=request_id)
        request = submitted.accepted.request
        if request.id == request_id:
            request = _Waiting(service, request, subscription, client, bool(key)).until_end()
        else:
            request = _until_end_of_other(service, request)
    _raise_unless_succeeded(request)
    return Ended(request, submitted.given)


@dataclass(slots=True)
class _Waiting:
    service: Service
    request: Request
    subscription: Subscription
    client: Client
    outlives_client: bool

    def until_end(self) -> Request:
        store_away_since: float | None = None
        while True:
            try:
                self.request = self.service.router.store.get(self.request.id)
                self._let_go()
                store_away_since = None
                pause = _LOOK_S
            except RedisError:
                # The replica goes on meanwhile; a retry of the client's would make it all again.
                store_away_since = store_away_since or time.monotonic()
                if time.monotonic() - store_away_since > _STORE_AWAY_S:
                    raise
                pause = _STORE_PAUSE_S
            if self.request.is_terminal:
                return self.request
            self.subscription.wait(pause)

    def _let_go(self) -> None:
        """Cancel a request that nobody waits for any more."""
        closing = self.service.held_calls.closed
        if self.request.is_terminal or not (closing or self.client.gone):
            return
        if not self.outlives_client:
            self.service.router.cancel(self.request.id)
            _logger.info("%s is canceled: nobody waits for it any more", self.request.id)
        if self.client.gone:
            raise ClientGone("The client has closed its connection.")
        raise Unavailable("This door is closing; send the request again.", retry_after=_RETRY_S)


def _until_end_of_other(service: Service, request: Request) -> Request:
    """Wait for a request that an earlier call with the same key made; it is not ours to cancel."""
    with (
        service.held_calls.hold(request.id, only_end=True) as subscription,
        service.clients.watching(_connection(), subscription.notify) as client,
    ):
        return _Waiting(service, request, subscription, client, True).until_end()


def _connection() -> socket.socket | None:
    found = call.environ.get("gunicorn.socket")
    return found if isinstance(found, socket.socket) else None


def _raise_unless_succeeded(request: Request) -> None:
    match request.status:
        case Status.SUCCEEDED:
            return
        case Status.CANCELED:
            raise RequestCanceled(f"Request {request.id} was canceled.")
        case Status.EXPIRED:
            raise RequestExpired(f"Request {request.id} did not start by the time it had to.")
    code, message = (
        (request.error.code, request.error.message) if request.error else ("", "no reason is known")
    )
    raise GenerationError.of_code(code, f"Request {request.id} failed: {message}")
