"""The connection to Redis: one way to open it for the door, the replicas and the scripts.

Knows timeouts and retries, TLS and Sentinel; and what kombu must be told to reach the same Redis.
Does not know what is stored.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, Final
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from redis.sentinel import Sentinel

from configs.redis_url import RedisUrl
from routing.patient_connection import make_patient

# The stream reader blocks this long in Redis; every socket timeout must be longer, or an idle
# reader is taken for a dead connection (seen with redis-py 8: an answer after 58 s instead of 8).
BLOCK_S = 1.0

# The door's: to connect, and to wait for an answer; and what a call may wait for Redis in all, with
# its wake-up. The rest of the two seconds in which a client has its 503 is the door's own work.
DOOR_CONNECT_S: Final = 0.6
DOOR_ANSWER_S: Final = 1.0
DOOR_PATIENCE_S: Final = 1.5

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
