"""The watch over clients that wait: tells a held call that its client has closed the connection.

One thread in each process waits for all their sockets at once, so that a client that goes is known
at that moment and waiting costs nothing. Does not know what is done about it.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

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
        """Watch one connection as long as the context lasts; None is one that can not be watched.

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
