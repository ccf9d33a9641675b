"""The forms of a Redis URL, and what redis-py and kombu are told of each."""

from __future__ import annotations

import ssl

import pytest

from configs.redis_url import RedisUrl
from routing.connection import broker_options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://h", RedisUrl("redis", (("h", 6379),))),
        ("redis://:p%40ss@h:1/2", RedisUrl("redis", (("h", 1),), db=2, password="p@ss")),
        ("redis://me:p@[::1]:7/0", RedisUrl("redis", (("::1", 7),), username="me", password="p")),
        ("unix:///run/redis.sock?db=3", RedisUrl("unix", path="/run/redis.sock", db=3)),
        (
            "rediss://h/1?ssl_ca_certs=/ca.pem",
            RedisUrl(
                "rediss",
                (("h", 6379),),
                db=1,
                tls=(
                    ("ssl_cert_reqs", "required"),
                    ("ssl_check_hostname", True),
                    ("ssl_ca_certs", "/ca.pem"),
                ),
            ),
        ),
        (
            "sentinel://:p@a,b:7,[::1]:8/4?master=main&sentinel_password=q",
            RedisUrl(
                "sentinel",
                (("a", 26379), ("b", 7), ("::1", 8)),
                db=4,
                password="p",
                master="main",
                sentinel_password="q",
            ),
        ),
    ],
)
def test_a_url_is_taken_apart(text: str, expected: RedisUrl) -> None:
    assert RedisUrl.parse(text) == expected


def test_no_password_is_shown() -> None:
    url = RedisUrl.parse("sentinel://me:hunter2@a,b:7/0?master=main&sentinel_password=hunter3")
    assert "hunter" not in repr(url) + url.shown
    assert url.shown == "main of the Sentinels at a:26379,b:7"
    assert RedisUrl.parse("unix:///run/redis.sock").shown == "/run/redis.sock"


def test_a_certificate_is_checked_unless_the_url_says_not_to() -> None:
    assert broker_options("rediss://h")["broker_use_ssl"] == {
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
        "ssl_check_hostname": True,
    }
    assert broker_options("rediss://h?ssl_cert_reqs=none")["broker_use_ssl"] == {
        "ssl_cert_reqs": ssl.CERT_NONE,
        "ssl_check_hostname": False,
    }


def test_celery_is_told_of_every_sentinel() -> None:
    options = broker_options("sentinel://me:p%2F@a,b:7/4?master=main&sentinel_password=q")
    assert options["broker_url"] == "sentinel://me:p%2F@a:26379/4;sentinel://me:p%2F@b:7/4"
    transport = options["broker_transport_options"]
    assert transport["master_name"] == "main"
    assert transport["sentinel_kwargs"]["password"] == "q"
