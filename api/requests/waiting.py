"""Calls that wait for a request, and the watch over clients that go away meanwhile."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar, Final

from redis.exceptions import RedisError

from configs.errors import ServingError
from routing.changes import Changes, Subscription
from routing.records import Records
from routing.request import Request

# Only for systems whose selector does not see what was registered after it began to wait.
_LOOK_S: Final = 1.0


class Client:
    """One client that waits."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Call `wake` once when it goes."""
        self._wake = wake
        self._gone = threading.Event()

    @property
    def gone(self) -> bool:
        """Whether it has closed its connection."""
        return self._gone.is_set()

    def leave(self) -> None:
        """Note that it has gone."""
        self._gone.set()
        self._wake()


class ClientWatch:
    """Watches the sockets of the clients that this process makes wait."""

    def __init__(self) -> None:
        """Watch nothing before :meth:`start`."""
        self._selector: selectors.BaseSelector | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching; threads do not outlive a fork, so each process calls it itself."""
        if self._thread is None:
            self._selector = selectors.DefaultSelector()
            self._bell = socket.socketpair()
            self._selector.register(self._bell[0], selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._watch, name="clients", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop watching; returns once the thread has ended."""
        self._stopped.set()
        if self._thread is None or self._selector is None or self._bell is None:
            return
        self._bell[1].send(b"!")
        self._thread.join(timeout=2 * _LOOK_S)
        self._selector.close()
        for end in self._bell:
            end.close()
        self._bell = None

    @contextmanager
    def watching(
        self, connection: socket.socket | None, wake: Callable[[], None]
    ) -> Iterator[Client]:
        """Watch one connection as long as the context lasts; None is one that cannot be watched.

        Nobody else may read from it meanwhile.
        """
        client = Client(wake)
        if connection is None or self._selector is None:
            yield client
            return
        with self._lock:
            self._selector.register(connection, selectors.EVENT_READ, client)
        try:
            yield client
        finally:
            self._forget(connection)

    def _watch(self) -> None:
        assert self._selector is not None
        while not self._stopped.is_set():
            for key, _ in self._selector.select(_LOOK_S):
                connection, client = key.fileobj, key.data
                if isinstance(connection, socket.socket) and isinstance(client, Client):
                    # What is readable stays so: one look, and then no more.
                    self._forget(connection)
                    if _has_closed(connection):
                        client.leave()

    def _forget(self, connection: socket.socket) -> None:
        assert self._selector is not None
        with self._lock, suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection)


def _has_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a readable connection, and not just sent its next call."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except ValueError:
        # Under TLS nothing can be looked at without taking it.
        return False
    except OSError:
        return True


_AWAY_S: Final = (
    5.0  # the stream of changes wakes everybody when Redis is back; in case it does not
)


class TooManyWaits(ServingError):
    """Raised when as many calls are held already as this process may hold."""

    status: ClassVar[int] = 429
    code: ClassVar[str] = "too_many_waits"
    retryable = True


class HeldCalls:
    """The calls that this process holds."""

    def __init__(self, records: Records, changes: Changes, limit: int) -> None:
        """Hold at most `limit` calls at a time."""
        self._records = records
        self._changes = changes
        self._limit = limit
        self._lock = threading.Lock()
        self._held: set[Subscription] = set()
        self._closed = False

    @property
    def count(self) -> int:
        """How many calls are held at this moment."""
        return len(self._held)

    def wait(self, request: Request, seconds: float) -> Request:
        """Return the request once it has ended, or as it stands after `seconds`, or when closing.

        Redis may go away and come back meanwhile; then it is the request as it was last known.

        Raises:
            TooManyWaits: The limit is reached.
            NotFound: The record was removed meanwhile.
        """
        deadline = time.monotonic() + seconds
        with self.hold(request.id, only_end=True) as subscription:
            while True:
                # Read after subscribing: an end between the two would otherwise be missed.
                pause_s = seconds
                try:
                    request = self._records.get(request.id)
                except RedisError:
                    pause_s = _AWAY_S
                left = deadline - time.monotonic()
                if request.is_terminal or left <= 0 or self._closed:
                    return request
                subscription.wait(min(left, pause_s))

    @property
    def closed(self) -> bool:
        """Whether held calls are to end now."""
        return self._closed

    def close(self) -> None:
        """Let every held call answer now, with the request as it stands; hold none from now on."""
        self._closed = True
        with self._lock:
            held = list(self._held)
        for subscription in held:
            subscription.notify()

    @contextmanager
    def hold(self, request_id: str, *, only_end: bool) -> Iterator[Subscription]:
        """Count as a held call that is woken by the changes of a request, or by its end only.

        Raises:
            TooManyWaits: The limit is reached.
        """
        with self._changes.subscribe(request_id, only_end=only_end) as subscription:
            with self._lock:
                if len(self._held) >= self._limit:
                    raise TooManyWaits(
                        f"This process already holds {self._limit} calls; poll the request "
                        "without `Prefer: wait` and events, or ask again later.",
                        retry_after=1.0,
                    )
                self._held.add(subscription)
            try:
                yield subscription
            finally:
                with self._lock:
                    self._held.remove(subscription)
