"""Bad networks for the tests: places that answer nothing, and a relay that speaks TLS."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_COMMAND: Final = re.compile(rb"\*\d+\r\n\$\d+\r\n([A-Za-z]+)\r\n")
_HANDSHAKE: Final = frozenset({b"HELLO", b"AUTH", b"CLIENT", b"SELECT", b"PING"})


@contextmanager
def mute_port() -> Iterator[int]:
    """A port that takes every connection and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(128)
        yield server.getsockname()[1]


@contextmanager
def swallowing_port() -> Iterator[int]:
    """A port whose packets get lost: its queue is full, so that nobody ever gets through."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(server.getsockname())
        yield server.getsockname()[1]


class StallingRelay:
    """Passes commands on to a server, until it goes silent in the midst of them.

    Attributes:
        port: Where it listens.
        commands: What passed, as it was sent; the client library's handshakes are not among them.
        stalled: Whether it has gone silent.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._lock = threading.Lock()
        self._allowed: int | None = None
        self._keep_last = False
        self._pause_s = 0.0
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        self.commands: list[bytes] = []
        self.stalled = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def stall_after(self, commands: int, *, keep_last: bool = False) -> None:
        """Go silent after so many commands; with ``keep_last`` the next gets there, unanswered."""
        self._allowed, self._keep_last = commands, keep_last
        self.stalled, self.commands = commands == 0 and not keep_last, []

    def delay_each(self, seconds: float) -> None:
        """Pass each command on only after so many seconds."""
        self._pause_s = seconds

    def heal(self) -> None:
        """Pass everything on again; connections that were silent are gone."""
        self._allowed, self._pause_s, self.stalled = None, 0.0, False
        with self._lock:
            silent, self._sockets = self._sockets, []
        for each in silent:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                return
            with self._lock:
                self._sockets += [client, server]
            for pump, ends in ((self._ask, (client, server)), (self._answer, (server, client))):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client, server:
            while data := client.recv(65_536):
                if self._passes(data):
                    self._closing.wait(self._pause_s)
                    server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65_536):
                if not self.stalled:
                    client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def _passes(self, data: bytes) -> bool:
        name = _COMMAND.match(data)
        with self._lock:
            if self.stalled:
                return False
            if name is None or name[1].upper() in _HANDSHAKE:
                return True
            self.stalled = self._allowed is not None and len(self.commands) >= self._allowed
            if self.stalled and not self._keep_last:
                return False
            self.commands.append(data)
            return True


@contextmanager
def stalling_relay(server_port: int) -> Iterator[StallingRelay]:
    """A relay to a server, closed at the end."""
    relay = StallingRelay(server_port)
    try:
        yield relay
    finally:
        relay.close()


@contextmanager
def tls_relay(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """A port that speaks TLS and passes what it hears on to ``port``, as stunnel does."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=_relay, args=(plain, port, context), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def _relay(plain: socket.socket, port: int, context: ssl.SSLContext) -> None:
    with contextlib.suppress(OSError), plain:
        plain.settimeout(10)
        with (
            context.wrap_socket(plain, server_side=True) as client,
            socket.create_connection(("127.0.0.1", port)) as target,
        ):
            client.settimeout(None)
            back = threading.Thread(target=_pump, args=(target, client), daemon=True)
            back.start()
            _pump(client, target)
            back.join(10)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    for end in (sink, source):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
