"""The connection to Redis, and how long a call of the API may wait for it."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelManagedConnection

from configs.redis_url import RedisUrl

# The stream reader blocks this long in Redis; every socket timeout must be longer, or an idle
# reader is taken for a dead connection (seen with redis-py 8: an answer after 58 s instead of 8).
BLOCK_S: Final = 1.0

# A call of the API begins no further wait for Redis once it has waited for API_PATIENCE_S in all.
# What it began then may take a connect and an answer, so it is over within three seconds.
API_CONNECT_S: Final = 0.4
API_ANSWER_S: Final = 1.0
API_PATIENCE_S: Final = 1.2

# A peer that is gone without a word (its host lost power) is noticed within half a minute.
KEEPALIVE: Final = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
}

# A thread has one at a time, so threads are what bounds them. With fewer (the library's own bound
# is 100) an API with many held calls would refuse some of those that all wake at once.
_MOST_CONNECTIONS: Final = 100_000


class Patience:
    """What is left of the seconds that a call may wait.

    Attributes:
        left_s: Seconds; 0 once they are spent.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._all_s = self.left_s = seconds
        self._clock = clock
        self._waits = False

    def renew(self) -> None:
        """Begin again: the call has been held meanwhile, and nobody expects its answer in time."""
        self.left_s = self._all_s

    @contextmanager
    def granted(self, wanted_s: float | None = None) -> Iterator[float]:
        """Yield the seconds that a wait may take, ``wanted_s`` at most; draw what it took.

        Raises:
            redis.TimeoutError: Nothing is left.
        """
        seconds = self.left_s if wanted_s is None else min(wanted_s, self.left_s)
        if self._waits:  # a part of the wait that draws already, such as its connect
            yield seconds
            return
        if seconds <= 0:
            raise RedisTimeoutError("the call has waited for Redis as long as it may")
        self._waits, started = True, self._clock()
        try:
            yield seconds
        finally:
            self._waits = False
            self.left_s = max(0.0, self.left_s - (self._clock() - started))


_threads = threading.local()


def begin_patience(seconds: float) -> None:
    """Give the call that this thread begins its patience."""
    _threads.patience = Patience(seconds)


def end_patience() -> None:
    """End the patience of this thread's call."""
    _threads.patience = None


def renew_patience() -> None:
    """Renew the patience of this thread's call, if it has one."""
    if patience := _of_this_thread():
        patience.renew()


@contextmanager
def granted(wanted_s: float | None = None) -> Iterator[float | None]:
    """Do :meth:`Patience.granted` for this thread's call; without one yield ``wanted_s``.

    Raises:
        redis.TimeoutError: Nothing is left.
    """
    patience = _of_this_thread()
    if patience is None:
        yield wanted_s
        return
    with patience.granted(wanted_s) as seconds:
        yield seconds


def _of_this_thread() -> Patience | None:
    return getattr(_threads, "patience", None)


class PatientRetry(Retry):
    """Has each wait of redis-py draw on the patience of its call: all of them go through here."""

    def call_with_retry(self, *args: Any, **options: Any) -> Any:
        """Do what the base class does, in the time that :func:`granted` grants."""
        with granted():
            return super().call_with_retry(*args, **options)


class NameLookup:
    """Bounds lookups of host names, for which the system knows no timeout."""

    def __init__(self, ask: Callable[[str, None], object] = socket.getaddrinfo) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._under_way: dict[str, threading.Event] = {}

    def wait_for(self, host: str, timeout_s: float | None) -> None:
        """Return once the system answers for ``host``, be it that there is no such name.

        Raises:
            redis.TimeoutError: It took longer than ``timeout_s``.
        """
        with suppress(ValueError):
            ipaddress.ip_address(host)
            return
        with self._lock:
            answered = self._under_way.get(host)
            if answered is None:  # those who wait share one thread, however long it hangs
                answered = self._under_way[host] = threading.Event()
                threading.Thread(target=self._look_up, args=(host, answered), daemon=True).start()
        if not answered.wait(timeout_s):
            raise RedisTimeoutError(f"the address of {host!r} was not found in time")

    def _look_up(self, host: str, answered: threading.Event) -> None:
        try:
            with suppress(OSError, UnicodeError):
                self._ask(host, None)
        finally:
            with self._lock:
                del self._under_way[host]
            answered.set()


names: Final = NameLookup()


class NamedConnection(Connection):
    """A connection by TCP that looks its host up in time before redis-py does."""

    def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """Connect as the base class does; raises redis.TimeoutError where no address is found."""
        if not self.is_connected:
            names.wait_for(self.host, self.socket_connect_timeout)
        super().connect_check_health(check_health, retry_socket_connect)


class NamedTlsConnection(SSLConnection, NamedConnection):
    """The same by TLS."""


class NamedSentinelConnection(SentinelManagedConnection, NamedConnection):
    """The same to the server that the Sentinels call the master."""


_NAMED: Final[dict[type, type]] = {
    Connection: NamedConnection,
    SSLConnection: NamedTlsConnection,
    SentinelManagedConnection: NamedSentinelConnection,
}


def connect(url: str, timeout_s: float = 1.5, answer_s: float | None = None) -> Redis:
    """Open a client that fails within seconds, so that the API can say 503 in time.

    A command whose connection turns out to be closed (Redis was restarted while it sat idle in the
    pool) is sent once more on a new one; every script here may be repeated safely or is fenced.

    Args:
        url: As :class:`configs.redis_url.RedisUrl` has it.
        timeout_s: Seconds to connect.
        answer_s: Seconds to wait for an answer; by default long enough to block for ``BLOCK_S``.

    Raises:
        ValueError: ``url`` is no Redis URL.
    """
    target = RedisUrl.parse(url)
    retry = PatientRetry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": timeout_s + BLOCK_S if answer_s is None else answer_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 15,
        "max_connections": _MOST_CONNECTIONS,
        "retry": retry,
    }
    if target.scheme == "unix":
        return Redis.from_url(target.text, **options)
    options |= {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    if target.scheme != "sentinel":
        client = Redis.from_url(target.text, **options)
        clients = [client]
    else:
        sentinels = Sentinel(  # type: ignore[no-untyped-call]
            target.hosts, sentinel_kwargs=_to_sentinels(target, timeout_s) | {"retry": retry}
        )
        options |= {"db": target.db, "username": target.username or None}
        options |= {"password": target.password or None}
        client = sentinels.master_for(target.master, **options)  # type: ignore[no-untyped-call]
        clients = [client, *sentinels.sentinels]
    for each in clients:
        pool = each.connection_pool
        pool.connection_class = _NAMED[pool.connection_class]
    return client


def broker_options(url: str) -> dict[str, Any]:
    """Return what Celery must be told to reach the same Redis: URL and transport options.

    Raises:
        ValueError: ``url`` is no Redis URL.
    """
    target = RedisUrl.parse(url)
    user = f"{quote(target.username, safe='')}:{quote(target.password, safe='')}@"
    user = user if target.username or target.password else ""
    if target.scheme == "unix":
        where = f"redis+socket://{user}{quote(target.path)}?virtual_host={target.db}"
        return {"broker_url": where, "broker_transport_options": {}}
    transport: dict[str, Any] = {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    where = target.text
    if target.scheme == "sentinel":
        where = ";".join(
            f"sentinel://{user}{f'[{host}]' if ':' in host else host}:{port}/{target.db}"
            for host, port in target.hosts
        )
        transport |= {"master_name": target.master, "sentinel_kwargs": _to_sentinels(target, 1.5)}
    return {"broker_url": where, "broker_transport_options": transport}


def _to_sentinels(target: RedisUrl, timeout_s: float) -> dict[str, Any]:
    """Half the time for each: several may have to be asked before one answers."""
    return {
        "decode_responses": True,
        "socket_connect_timeout": timeout_s / 2,
        "socket_timeout": timeout_s / 2,
        "password": target.sentinel_password or None,
    }
