"""The connection to Redis, and how long a call of the API may wait for it."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelManagedConnection

from configs.redis_url import RedisUrl

Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]


_Key = tuple[str, int, int]


def _by_the_system(host: str, port: int, family: int) -> list[Address]:
    return [*socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)]


class NameLookup:
    """Looks names up by ``ask``, which is handed host, port and address family."""

    def __init__(self, ask: Callable[[str, int, int], list[Address]] = _by_the_system) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._under_way: dict[_Key, Future[list[Address]]] = {}

    def addresses(
        self, host: str, port: int, family: int, timeout_s: float | None
    ) -> list[Address]:
        """Return the addresses of a host, as :func:`socket.getaddrinfo` does.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
            OSError: There is no such name, or nobody could say.
        """
        if _is_address(host):
            return self._ask(host, port, family)
        key = (host, port, family)
        with self._lock:
            found = self._under_way.get(key)
            if found is None:
                found = self._under_way[key] = Future()
                threading.Thread(
                    target=self._fulfil, args=(key, found), name=f"lookup of {host}", daemon=True
                ).start()
        try:
            return found.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the address of {host!r} was not found in time") from None

    def _fulfil(self, key: _Key, promised: Future[list[Address]]) -> None:
        try:
            promised.set_result(self._ask(*key))
        except Exception as error:  # noqa: BLE001 - it is raised where the lookup is waited for
            promised.set_exception(error)
        finally:
            with self._lock:
                del self._under_way[key]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Patience:
    """What is left of the seconds that a call may wait.

    Attributes:
        left_s: Seconds; 0 once they are spent.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with ``seconds``."""
        self._all_s = seconds
        self._clock = clock
        self.left_s = seconds

    def renew(self) -> None:
        """Begin again: the call has been held meanwhile, and nobody expects its answer in time."""
        self.left_s = self._all_s

    @contextmanager
    def granted(self, wanted_s: float | None) -> Iterator[float]:
        """Grant an operation up to ``wanted_s`` (None: no limit of its own), and draw what it took.

        Raises:
            TimeoutError: Nothing is left.
        """
        if self.left_s <= 0:
            raise TimeoutError("the call has waited for Redis as long as it may")
        seconds = self.left_s if wanted_s is None else min(wanted_s, self.left_s)
        started = self._clock()
        try:
            yield seconds
        finally:
            self.left_s = max(0.0, self.left_s - (self._clock() - started))


_threads = threading.local()


def begin_patience(seconds: float) -> None:
    """Give the call that this thread begins its patience."""
    _threads.patience = Patience(seconds)


def end_patience() -> None:
    """The call of this thread is over."""
    _threads.patience = None


def renew_patience() -> None:
    """Renew the patience of this thread's call, if it has one."""
    patience = _of_this_thread()
    if patience is not None:
        patience.renew()


@contextmanager
def granted(wanted_s: float | None) -> Iterator[float | None]:
    """Grant an operation of this thread as :meth:`Patience.granted`; all it wants without one.

    Raises:
        TimeoutError: Nothing is left.
    """
    patience = _of_this_thread()
    if patience is None or wanted_s == 0:  # what does not wait takes nothing
        yield wanted_s
        return
    with patience.granted(wanted_s) as seconds:
        yield seconds


def _of_this_thread() -> Patience | None:
    patience: Patience | None = getattr(_threads, "patience", None)
    return patience


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


# The stream reader blocks this long in Redis; every socket timeout must be longer, or an idle
# reader is taken for a dead connection (seen with redis-py 8: an answer after 58 s instead of 8).
BLOCK_S = 1.0


# The door's: to connect, and to wait for an answer; and what a call may wait for Redis in all, with
# its wake-up. The rest of the two seconds in which a client has its 503 is the door's own work.
API_CONNECT_S: Final = 0.6


API_ANSWER_S: Final = 1.0


API_PATIENCE_S: Final = 1.5


# A peer that is gone without a word (its host lost power) is noticed within half a minute.
KEEPALIVE: Final = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
}


# A thread has one at a time, so threads are what bounds them. With fewer (the library's own bound
# is 100) a door with many held calls would refuse some of those that all wake at once.
_MOST_CONNECTIONS: Final = 100_000


_CERT_REQS: Final = {
    "required": ssl.CERT_REQUIRED,
    "optional": ssl.CERT_OPTIONAL,
    "none": ssl.CERT_NONE,
}


def connect(url: str, timeout_s: float = 1.5, answer_s: float | None = None) -> Redis:
    """Open a client that fails within seconds, so that the door can say 503 in time.

    A command whose connection turns out to be closed (Redis was restarted while it sat idle in the
    pool) is sent once more on a new one; every script here may be repeated safely or is fenced.
    Whatever it waits for draws on the patience of the call at hand (``patience``).

    Args:
        url: As :class:`configs.redis_url.RedisUrl` has it.
        timeout_s: Seconds to connect.
        answer_s: Seconds to wait for an answer; by default long enough to block for ``BLOCK_S``.

    Raises:
        ValueError: ``url`` is no Redis URL.
    """
    target = RedisUrl.parse(url)
    options: dict[str, Any] = {
        "decode_responses": True,
        "db": target.db,
        "username": target.username or None,
        "password": target.password or None,
        "socket_timeout": timeout_s + BLOCK_S if answer_s is None else answer_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 15,
        "max_connections": _MOST_CONNECTIONS,
        "retry": Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
    }
    if target.scheme == "unix":
        return _patient(Redis(unix_socket_path=target.path, **options))
    options |= {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    if target.scheme != "sentinel":
        ((host, port),) = target.hosts
        if target.scheme == "rediss":
            options |= {"ssl": True, **dict(target.tls)}
        return _patient(Redis(host=host, port=port, **options))
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        target.hosts, sentinel_kwargs=_to_sentinels(target, timeout_s)
    )
    for each in sentinels.sentinels:
        _patient(each)
    client: Redis = sentinels.master_for(target.master, **options)  # type: ignore[no-untyped-call]
    return _patient(client)


def broker_options(url: str) -> dict[str, Any]:
    """Return what Celery must be told to reach the same Redis: URL, TLS, transport options.

    Raises:
        ValueError: ``url`` is no Redis URL.
    """
    target = RedisUrl.parse(url)
    user = f"{quote(target.username, safe='')}:{quote(target.password, safe='')}@"
    user = user if target.username or target.password else ""
    transport: dict[str, Any] = {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    if target.scheme == "unix":
        where = f"redis+socket://{user}{quote(target.path)}?virtual_host={target.db}"
        return {"broker_url": where, "broker_transport_options": {}}
    places = ";".join(
        f"{target.scheme}://{user}{_bracketed(host)}:{port}/{target.db}"
        for host, port in target.hosts
    )
    options: dict[str, Any] = {"broker_url": places, "broker_transport_options": transport}
    if target.scheme == "rediss":
        tls = dict(target.tls)
        options["broker_use_ssl"] = {**tls, "ssl_cert_reqs": _CERT_REQS[str(tls["ssl_cert_reqs"])]}
    if target.scheme == "sentinel":
        transport |= {"master_name": target.master, "sentinel_kwargs": _to_sentinels(target, 1.5)}
    return options


def _patient(client: Redis) -> Redis:
    make_patient(client.connection_pool)
    return client


def _to_sentinels(target: RedisUrl, timeout_s: float) -> dict[str, Any]:
    """Half the time for each: several may have to be asked before one answers."""
    return {
        "decode_responses": True,
        "socket_connect_timeout": timeout_s / 2,
        "socket_timeout": timeout_s / 2,
        "password": target.sentinel_password or None,
    }


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
