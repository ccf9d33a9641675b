"""A service of so many replicas, started for one measurement and ended after it.

It is the launcher (`scripts/serve.py`) on free ports, with a Redis and a run folder of its own.
Whatever ends this process ends it too. Does not know what is measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM
from tempfile import TemporaryDirectory
from typing import Any, Final

from configs.settings import REPOSITORY
from scripts.child_process import ChildProcess
from scripts.door import Door, NoAnswer, Refused
from scripts.redis_server import free_port
from scripts.refusal import StartRefused
from scripts.supervisor import last_line

_LOOK_EVERY_S: Final = 0.3
_END_S: Final = 30.0
# What would tie it to another service.
_NOT_INHERITED: Final = (
    "REDIS_URL",
    "STAGE_CONFIGS_PATH",
    "OUTPUTS_URL",
    "API_HOST",
    "API_PORT",
    "REPLICA_OFFSET",
)


@contextmanager
def running_service(
    stage_file: Path, replicas: int, start_timeout_s: float, api_key: str
) -> Iterator[str]:
    """Run the service of a stage file; the value is its base URL, with all replicas ready.

    Raises:
        StartRefused: It does not come up within `start_timeout_s` seconds, or says that it cannot.
    """
    with TemporaryDirectory(prefix="diffusion-sweep-") as name:
        folder, port = Path(name), free_port()
        log = folder / "launcher.log"
        process = ChildProcess(
            (
                *(sys.executable, "-m", "scripts.serve"),
                *("--stage-configs-path", str(stage_file), "--port", str(port)),
            ),
            environment=_environment(folder),
            folder=REPOSITORY,
            log=log,
            # The launcher has parts of its own to end.
            orphan_signal=SIGTERM,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(Door(url, api_key), process, log, replicas, start_timeout_s)
            yield url
        finally:
            _end(process)


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return {**kept, "RUN_DIR": str(folder / "run"), "FLOWER_PORT": str(free_port())}


def _wait(door: Door, process: ChildProcess, log: Path, replicas: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if (status := process.poll()) is not None:
            raise StartRefused(f"the service ended with code {status}: {last_line(log)}")
        listed = _replicas(door)
        for replica in listed:
            if replica["state"] == "failed":
                raise StartRefused(f"{replica['name']} failed: {replica['error']}")
        if sum(replica["state"] == "ready" for replica in listed) == replicas:
            return
        if time.monotonic() > deadline:
            raise StartRefused(
                f"{replicas} replicas were not ready within {timeout_s:g} s (--start-timeout); "
                f"the launcher's last line: {last_line(log)}"
            )
        time.sleep(_LOOK_EVERY_S)


def _replicas(door: Door) -> list[dict[str, Any]]:
    try:
        return door.replicas()
    except (NoAnswer, Refused):  # not up yet
        return []


def _end(process: ChildProcess) -> None:
    """End the launcher and all its parts; asked again by Ctrl-C it is told to hurry."""
    process.terminate()
    deadline = time.monotonic() + _END_S
    while process.poll() is None:
        try:
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(_LOOK_EVERY_S / 3)
        except KeyboardInterrupt:
            process.terminate()
