"""The connection to Redis: one way to open it for the door, the replicas and the scripts.

Knows timeouts and retries. Does not know what is stored.
"""

from __future__ import annotations

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

# The stream reader blocks this long in Redis; every socket timeout must be longer, or an idle
# reader is taken for a dead connection (seen with redis-py 8: an answer after 58 s instead of 8).
BLOCK_S = 1.0


def connect(url: str, timeout_s: float = 1.5) -> Redis:
    """Open a client that fails within seconds, so that the door can say 503 in time.

    A command whose connection turns out to be closed (Redis was restarted while it sat idle in the
    pool) is sent once more on a new one; every script here may be repeated safely or is fenced.

    Raises:
        ValueError: ``url`` is no Redis URL.
    """
    return Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=timeout_s + BLOCK_S,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
    )
