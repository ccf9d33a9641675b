"""A Redis URL taken apart: one server, a socket of this machine, or Sentinels that name the server.

    redis://[[user]:password@]host[:port][/db]
    rediss://…?ssl_ca_certs=…&ssl_cert_reqs=required|optional|none&ssl_certfile=…&ssl_keyfile=…
    unix://[[user]:password@]/path/of/socket[?db=0]
    sentinel://[[user]:password@]host[:port],host[:port]…[/db]?master=name[&sentinel_password=…]

Only what both redis-py (for the records) and kombu (for the messages) can do is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

_PORTS: Final = {"redis": 6379, "rediss": 6379, "sentinel": 26379}
_QUERY: Final = {
    "redis": (),
    "rediss": (
        *("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"),
        *("ssl_cert_reqs", "ssl_check_hostname"),
    ),
    "unix": ("db",),
    "sentinel": ("master", "sentinel_password"),
}
_CHOICES: Final = {
    "ssl_cert_reqs": ("required", "optional", "none"),
    "ssl_check_hostname": ("true", "false"),
}
_FIX: Final = "give one such as redis://127.0.0.1:6379/0"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The parts of a Redis URL.

    Attributes:
        text: The whole, as redis-py and kombu read it where ``scheme`` is redis or rediss.
        scheme: ``redis``, ``rediss``, ``unix`` or ``sentinel``.
        hosts: Host and port of the server, or of each Sentinel; none for a socket.
        path: The socket of ``unix``; empty otherwise.
        db: Number of the database.
        username: Empty for the default user.
        password: Of the server; empty for none.
        master: Name by which the Sentinels know the server; empty otherwise.
        sentinel_password: Of the Sentinels themselves.
    """

    text: str = field(repr=False)
    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    db: int = 0
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    master: str = ""
    sentinel_password: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a URL apart.

        Raises:
            ValueError: It is none; the message says what is wrong and how to fix it.
        """
        try:
            parts = urlsplit(text)
        except ValueError:
            raise ValueError(f"is not a URL; {_FIX}") from None
        if parts.scheme not in _QUERY:
            raise ValueError(f"is not a redis://, rediss://, unix:// or sentinel:// URL; {_FIX}")
        query = _query(parts)
        user, at, places = parts.netloc.rpartition("@")
        username, _, password = user.partition(":") if at else ("", "", "")
        if parts.scheme == "sentinel" and not query.get("master"):
            raise ValueError("names no master; add ?master= and the name the Sentinels know it by")
        if parts.scheme == "unix" and (places or parts.path in {"", "/"}):
            raise ValueError("names no socket; give one such as unix:///run/redis.sock")
        if parts.scheme == "rediss":
            # Both readers are told the same, since kombu alone would accept any certificate.
            query.setdefault("ssl_cert_reqs", "required")
            checks = "true" if query["ssl_cert_reqs"] == "required" else "false"
            query.setdefault("ssl_check_hostname", checks)
            text = parts._replace(query=urlencode(query)).geturl()
        return cls(
            text=text,
            scheme=parts.scheme,
            hosts=() if parts.scheme == "unix" else _hosts(parts.scheme, places),
            path=unquote(parts.path) if parts.scheme == "unix" else "",
            db=_db(query.get("db", "") if parts.scheme == "unix" else parts.path.strip("/")),
            username=unquote(username),
            password=unquote(password),
            master=query.get("master", ""),
            sentinel_password=query.get("sentinel_password", ""),
        )

    @property
    def shown(self) -> str:
        """Where it points to, without anything secret."""
        if self.scheme == "unix":
            return self.path
        places = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.master} of the Sentinels at {places}" if self.master else places


def _query(parts: SplitResult) -> dict[str, str]:
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = _QUERY[parts.scheme]
    for name, value in query.items():
        if name not in known:
            fix = f"use {', '.join(known)}" if known else "remove it"
            raise ValueError(f"has the option {name[:40]!r}, which {parts.scheme}:// lacks; {fix}")
        choices = _CHOICES.get(name)
        if choices and value not in choices:
            raise ValueError(f"has {value[:40]!r} for {name}; use one of {', '.join(choices)}")
    return {name: value for name, value in query.items() if value}


def _hosts(scheme: str, places: str) -> tuple[tuple[str, int], ...]:
    hosts = []
    for place in places.split(",") if scheme == "sentinel" else [places]:
        try:
            parts = urlsplit(f"//{place}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or port == 0:
            raise ValueError(f"names no host and port to connect to; {_FIX}")
        hosts.append((host, port or _PORTS[scheme]))
    return tuple(hosts)


def _db(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ValueError(f"has {text[:40]!r} for the number of the database; {_FIX}")
    return int(text)
