"""Bad networks for the tests: places that answer nothing, and a relay that speaks TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
