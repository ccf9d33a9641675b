"""A real Redis for the tests: found on this machine, started on a free port, stopped at the end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from scripts.launcher.preflight import StartRefused
from scripts.launcher.redis_server import find_redis, free_port
from tests.waiting import wait_until

__all__ = ["RedisServer", "find_redis_server", "free_port", "running_redis"]

_START_S = 10.0
_STOP_S = 10.0


def find_redis_server() -> str | None:
    """Return the server program that the launcher would take; None where there is none."""
    try:
        return find_redis()
    except StartRefused:
        return None


class RedisServer:
    """One server process; a durable one keeps its append-only file as the launcher's does.

    ``port`` stays the same over :meth:`stop` and :meth:`start`, so that a test can take Redis away
    and give it back.
    """

    def __init__(
        self,
        binary: str,
        folder: Path,
        *,
        durable: bool = False,
        password: str | None = None,
        extra: tuple[str, ...] = (),
    ) -> None:
        self.port = free_port()
        self._password = password
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            binary,
            *("--port", str(self.port)),
            *("--bind", "127.0.0.1"),
            *("--save", ""),
            *("--appendonly", "yes" if durable else "no"),
            *("--dir", str(folder)),
            *("--dbfilename", f"redis-{self.port}.rdb"),
            *extra,
        ]
        self._log = folder / f"redis-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and return once it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        wait_until(self._answers, _START_S, f"redis-server to answer (its log: {self._log})")

    def stop(self) -> None:
        """End it and wait for its process; what it held is gone unless it is durable."""
        if self._process is None:
            return
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # a frozen one would not hear of it
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)
        self._process = None

    def kill(self) -> None:
        """End it without a chance to write anything more."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(_STOP_S)
        self._process = None

    def freeze(self) -> None:
        """Let it hang: its connections stand, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on where it hung."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"redis-server ended at once; see {self._log}")
        with Redis(
            port=self.port,
            password=self._password,
            socket_timeout=1.0,
            socket_connect_timeout=1.0,
        ) as client:
            try:
                return bool(client.ping())
            except RedisError:
                return False


@contextmanager
def running_redis(binary: str, folder: Path, *, durable: bool = False) -> Iterator[RedisServer]:
    """Run a server as long as the context lasts."""
    server = RedisServer(binary, folder, durable=durable)
    server.start()
    try:
        yield server
    finally:
        server.stop()
