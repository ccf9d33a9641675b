"""Two real Redis servers and the Sentinels that watch them: a master, its copy, three to vote."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from tests.redis_server import RedisServer, free_port
from tests.waiting import wait_until

MASTER = "main"
PASSWORD = "a:b/c@d"
_READY_S = 30.0


class Sentinels:
    """All on ports of their own, as long as the context lasts; the servers ask for a password."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        auth = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
        self.master = RedisServer(binary, folder, password=PASSWORD, extra=auth)
        copies = (*auth, "--replicaof", "127.0.0.1", str(self.master.port))
        self.copy = RedisServer(binary, folder, password=PASSWORD, extra=copies)
        self._ports = [free_port() for _ in range(3)]
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """What ``REDIS_URL`` is to be."""
        places = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"sentinel://:a%3Ab%2Fc%40d@{places}/0?master={MASTER}"

    def kill_master(self) -> None:
        """End the master without a word; the Sentinels make the copy the new one."""
        self.master.kill()

    def wait_for_copy(self) -> None:
        """Return once the copy has all that the master has been told."""
        with Redis(port=self.master.port, password=PASSWORD, socket_timeout=5) as client:
            wait_until(lambda: client.wait(1, 1000) >= 1, _READY_S, "the copy to have it all")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def _start(self) -> None:
        self.master.start()
        self.copy.start()
        for port in self._ports:
            config = self._folder / f"sentinel-{port}.conf"
            config.write_text(
                f"port {port}\n"
                "bind 127.0.0.1\n"
                f"dir {self._folder}\n"
                f"sentinel monitor {MASTER} 127.0.0.1 {self.master.port} 2\n"
                f"sentinel auth-pass {MASTER} {PASSWORD}\n"
                f"sentinel down-after-milliseconds {MASTER} 1000\n"
                f"sentinel failover-timeout {MASTER} 5000\n"
            )
            with (self._folder / f"sentinel-{port}.log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [self._binary, str(config), "--sentinel"],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        for port in self._ports:
            wait_until(lambda p=port: self._knows_all(p), _READY_S, f"Sentinel {port}")  # type: ignore[misc]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(10)
        self.copy.stop()
        self.master.stop()

    def _knows_all(self, port: int) -> bool:
        try:
            with Redis(port=port, socket_timeout=1.0, decode_responses=True) as client:
                state = client.sentinel_master(MASTER)
        except RedisError:
            return False
        others, copies = int(state["num-other-sentinels"]), int(state["num-slaves"])
        return (others, copies) == (len(self._ports) - 1, 1)
