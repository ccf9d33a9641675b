"""The forms of a Redis URL, and what redis-py and kombu are told of each."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
from kombu.connection import Connection

from configs.redis_url import RedisUrl
from routing.connection import broker_options, connect


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://h", {"hosts": (("h", 6379),)}),
        ("redis://:p%40ss@h:1/2", {"hosts": (("h", 1),), "db": 2, "password": "p@ss"}),
        ("redis://me:p@[::1]:7/0", {"hosts": (("::1", 7),), "username": "me", "password": "p"}),
        ("unix:///run/redis.sock?db=3", {"path": "/run/redis.sock", "db": 3}),
        ("rediss://h/1?ssl_ca_certs=/ca.pem", {"hosts": (("h", 6379),), "db": 1}),
        (
            "sentinel://:p@a,b:7,[::1]:8/4?master=main&sentinel_password=q",
            {
                "hosts": (("a", 26379), ("b", 7), ("::1", 8)),
                "db": 4,
                "password": "p",
                "master": "main",
                "sentinel_password": "q",
            },
        ),
    ],
)
def test_a_url_is_taken_apart(text: str, expected: dict[str, Any]) -> None:
    url = RedisUrl.parse(text)
    assert url == RedisUrl(url.text, text.partition(":")[0], **expected)


@pytest.mark.parametrize(
    ("query", "checks"),
    [
        ("", (ssl.CERT_REQUIRED, True)),
        ("?ssl_cert_reqs=none", (ssl.CERT_NONE, False)),
        ("?ssl_check_hostname=false", (ssl.CERT_REQUIRED, False)),
    ],
)
def test_a_certificate_is_checked_unless_the_url_says_not_to(
    query: str, checks: tuple[ssl.VerifyMode, bool]
) -> None:
    url = f"rediss://h{query}"
    broker: Any = Connection(broker_options(url)["broker_url"]).ssl
    assert (broker["ssl_cert_reqs"], broker["ssl_check_hostname"]) == checks
    connection: Any = connect(url).connection_pool.make_connection()
    assert (connection.cert_reqs, connection.check_hostname) == checks


def test_no_password_is_shown() -> None:
    url = RedisUrl.parse("sentinel://me:hunter2@a,b:7/0?master=main&sentinel_password=hunter3")
    assert "hunter" not in repr(url) + url.shown
    assert url.shown == "main of the Sentinels at a:26379,b:7"
    assert RedisUrl.parse("unix:///run/redis.sock").shown == "/run/redis.sock"


def test_celery_is_told_of_every_sentinel() -> None:
    options = broker_options("sentinel://me:p%2F@a,b:7/4?master=main&sentinel_password=q")
    assert options["broker_url"] == "sentinel://me:p%2F@a:26379/4;sentinel://me:p%2F@b:7/4"
    transport = options["broker_transport_options"]
    assert transport["master_name"] == "main"
    assert transport["sentinel_kwargs"]["password"] == "q"
