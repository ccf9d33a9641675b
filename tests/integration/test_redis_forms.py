"""Redis behind TLS, on a socket, under Sentinels: records and messages both get there."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from celery import Celery
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from configs.settings import Settings
from routing.broker import RUN_TASK, Broker, celery_settings
from routing.connection import connect
from tests.network import tls_relay
from tests.redis_server import RedisServer
from tests.sentinels import Sentinels
from tests.waiting import wait_until

BACK_S = 40.0


def _records_and_messages_get_there(settings: Settings) -> None:
    """Write as the API does, and read as a worker does."""
    client = connect(settings.redis_url)
    assert client.set(f"{settings.redis_prefix}probe", "1")
    assert client.get(f"{settings.redis_prefix}probe") == "1"
    client.close()
    broker = Broker(settings)
    assert broker.wake("replica0", "req_1", 1)
    broker.close()
    assert _received(settings) == RUN_TASK


def _received(settings: Settings) -> str:
    """Take a message off the queue, by the configuration that the workers have."""
    app = Celery("probe", set_as_current=False)
    app.conf.update(celery_settings(settings))
    with app, app.connection_for_read() as connection, connection.SimpleQueue("replica0") as queue:
        message = queue.get(timeout=10)
        message.ack()
        name: str = message.headers["task"]
        return name


@pytest.fixture
def tls(redis_url: str, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A port that speaks TLS before the tests' Redis, and the authority that vouches for it."""
    authority, ca_file = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with tls_relay(int(redis_url.rpartition(":")[2].partition("/")[0]), context) as port:
        yield port, ca_file


def test_by_tls(settings: Settings, redis_client: Redis, tls: tuple[int, Path]) -> None:
    port, ca_file = tls
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={ca_file}"
    _records_and_messages_get_there(replace(settings, redis_url=url))


@pytest.mark.parametrize("query", ["", "?ssl_ca_certs={ca}"])
def test_a_certificate_that_nobody_vouches_for_or_of_another_name_is_refused(
    settings: Settings, tls: tuple[int, Path], query: str
) -> None:
    port, ca_file = tls
    host = "127.0.0.1" if query else "localhost"
    url = f"rediss://{host}:{port}/0{query.format(ca=ca_file)}"
    with pytest.raises(RedisConnectionError, match=r"(?i)certificate"):
        connect(url).ping()
    broker = Broker(replace(settings, redis_url=url))
    assert not broker.wake("replica0", "req_1", 1)
    broker.close()


def test_by_tls_of_any_certificate_where_the_url_says_so(
    settings: Settings, redis_client: Redis, tls: tuple[int, Path]
) -> None:
    url = f"rediss://127.0.0.1:{tls[0]}/0?ssl_cert_reqs=none"
    _records_and_messages_get_there(replace(settings, redis_url=url))


def test_by_a_socket(redis_binary: str, tmp_path: Path, settings: Settings) -> None:
    path = tmp_path / "redis.sock"
    server = RedisServer(redis_binary, tmp_path, extra=("--unixsocket", str(path)))
    server.start()
    try:
        url = f"unix://{path}?db=3"
        _records_and_messages_get_there(replace(settings, redis_url=url))
        with Redis(port=server.port, db=3, decode_responses=True) as client:
            assert client.get(f"{settings.redis_prefix}probe") == "1"
    finally:
        server.stop()


def test_by_sentinels_also_after_the_master_died(
    redis_binary: str, tmp_path: Path, settings: Settings
) -> None:
    with Sentinels(redis_binary, tmp_path) as sentinels:
        own = replace(settings, redis_url=sentinels.url)
        _records_and_messages_get_there(own)
        client, broker = connect(own.redis_url), Broker(own)
        assert broker.wake("replica0", "req_2", 1)
        sentinels.wait_for_copy()
        sentinels.kill_master()

        def writes() -> bool:
            try:
                return bool(client.set(f"{own.redis_prefix}after", "1"))
            except RedisConnectionError:
                return False

        wait_until(writes, BACK_S, "the records to follow to the new master")
        assert client.get(f"{own.redis_prefix}probe") == "1"
        wait_until(lambda: broker.wake("replica0", "req_3", 1), BACK_S, "the messages to follow")
        assert [_received(own), _received(own)] == [RUN_TASK] * 2
        broker.close()
        client.close()


def test_as_many_threads_as_there_are_may_ask_at_once(settings: Settings) -> None:
    client = connect(settings.redis_url)
    taken = [client.connection_pool.get_connection() for _ in range(150)]
    assert client.ping()
    for connection in taken:
        client.connection_pool.release(connection)
    client.close()
