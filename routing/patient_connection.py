"""Connections to Redis whose every wait draws on the patience of the call that it is for.

For a name's lookup, a connect, a TLS handshake, and each send and receive after them; so also for
what the client library does by itself: its own handshake, health checks, tries again, the question
who is the master. Does not know what is sent.
"""

from __future__ import annotations

import socket
from typing import Any, Final

from redis.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.sentinel import SentinelManagedConnection

from routing.name_lookup import NameLookup
from routing.patience import granted

_names: Final = NameLookup()


class PatientSocket:
    """A connected socket that waits no longer than its timeout, nor than the call's patience."""

    def __init__(self, connected: Any) -> None:
        """Take a socket over, with its timeout."""
        self._socket = connected
        self._timeout_s: float | None = connected.gettimeout()

    def settimeout(self, seconds: float | None) -> None:
        """Let each operation wait so long; None for ever, 0 not at all."""
        self._timeout_s = seconds

    def gettimeout(self) -> float | None:
        """Return the seconds that an operation may wait."""
        return self._timeout_s

    def recv(self, most: int) -> bytes:
        """Return up to ``most`` bytes, none where the other side has closed."""
        with granted(self._timeout_s) as seconds:
            self._socket.settimeout(seconds)
            data: bytes = self._socket.recv(most)
            return data

    def recv_into(self, buffer: Any) -> int:
        """Read into ``buffer``; return the number of bytes."""
        with granted(self._timeout_s) as seconds:
            self._socket.settimeout(seconds)
            count: int = self._socket.recv_into(buffer)
            return count

    def sendall(self, data: bytes) -> None:
        """Send all of ``data``."""
        with granted(self._timeout_s) as seconds:
            self._socket.settimeout(seconds)
            self._socket.sendall(data)

    def __getattr__(self, name: str) -> Any:
        """Return what does not wait, such as ``fileno`` and ``close``, as the socket has it."""
        return getattr(self._socket, name)


class PatientConnection(Connection):
    """A connection by TCP."""

    def _connect(self) -> Any:
        return PatientSocket(self._connected_socket())

    def _connected_socket(self) -> socket.socket:
        """Connect to the first address of the host that lets us."""
        with granted(self.socket_connect_timeout) as seconds:
            found = _names.addresses(self.host, self.port, self.socket_type, seconds)
        refused: OSError = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, address in found:
            made = socket.socket(family, kind, protocol)
            try:
                self._prepare(made)
                with granted(self.socket_connect_timeout) as seconds:
                    made.settimeout(seconds)
                    made.connect(address)
            except OSError as error:
                made.close()
                refused = error
            else:
                made.settimeout(self.socket_timeout)
                return made
        raise refused

    def _prepare(self, made: socket.socket) -> None:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.socket_keepalive:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in self.socket_keepalive_options.items():
                made.setsockopt(socket.IPPROTO_TCP, option, value)


class PatientTlsConnection(SSLConnection, PatientConnection):
    """A connection by TLS."""

    def _connect(self) -> Any:
        connected = self._connected_socket()
        try:
            with granted(self.socket_timeout) as seconds:
                connected.settimeout(seconds)  # which the handshake takes over
                secured: Any = self._wrap_socket_with_ssl(connected)  # type: ignore[no-untyped-call]
        except BaseException:
            connected.close()
            raise
        secured.settimeout(self.socket_timeout)
        return PatientSocket(secured)


class PatientUnixConnection(UnixDomainSocketConnection):
    """A connection by a socket of this machine."""

    def _connect(self) -> Any:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with granted(self.socket_connect_timeout) as seconds:
                made.settimeout(seconds)
                made.connect(self.path)
        except OSError:
            made.close()
            raise
        made.settimeout(self.socket_timeout)
        return PatientSocket(made)


class PatientSentinelConnection(SentinelManagedConnection, PatientConnection):
    """A connection to the server that the Sentinels call the master."""


_PATIENT: Final[dict[type, type]] = {
    Connection: PatientConnection,
    SSLConnection: PatientTlsConnection,
    UnixDomainSocketConnection: PatientUnixConnection,
    SentinelManagedConnection: PatientSentinelConnection,
}


def make_patient(pool: ConnectionPool) -> None:
    """Have a pool that has connected nothing yet make patient connections."""
    pool.connection_class = _PATIENT[pool.connection_class]
