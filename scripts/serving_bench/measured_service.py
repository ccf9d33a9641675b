"""A service for one measurement: its processes, started on free ports and ended after it.

The service is the launcher (`scripts/serve.py`) with its own run folder, and its own Redis unless
it is given one. Whatever ends this process ends it too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM
from tempfile import TemporaryDirectory
from typing import Any, Final

from configs.settings import REPOSITORY
from scripts.api_client import ApiClient, NoAnswer, Refused
from scripts.launcher.child_process import ChildProcess
from scripts.launcher.preflight import StartRefused
from scripts.launcher.redis_server import free_port, plan_redis
from scripts.launcher.supervisor import last_line

_LOOK_EVERY_S: Final = 0.3
_END_S: Final = 30.0
_REDIS_START_S: Final = 60.0


# What would tie it to another service.
_NOT_INHERITED: Final = (
    "REDIS_URL",
    "STAGE_CONFIGS_PATH",
    "OUTPUTS_URL",
    "API_HOST",
    "API_PORT",
    "REPLICA_OFFSET",
    "CPU_DEVICES",
)


@contextmanager
def running_service(
    stage_file: Path,
    replicas: int,
    start_timeout_s: float,
    api_key: str = "",
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run the service of a stage file; the value is its base URL, with all replicas ready.

    Args:
        stage_file: What it serves.
        replicas: How many replicas that is.
        start_timeout_s: Seconds it may take until all are ready.
        api_key: The key it asks for, empty for none.
        environment: Settings of its own, such as `REDIS_URL` where it is to start no Redis.

    Raises:
        StartRefused: It does not come up in time, or says that it cannot.
    """
    with TemporaryDirectory(prefix="diffusion-service-") as name:
        folder, port = Path(name), free_port()
        url = f"http://127.0.0.1:{port}"
        launcher = (
            *(sys.executable, "-m", "scripts.serve"),
            *("--stage-configs-path", str(stage_file), "--port", str(port)),
        )
        own = {"RUN_DIR": str(folder / "run"), "FLOWER_PORT": str(free_port())}
        with _running(
            launcher,
            {**own, **(environment or {})},
            folder / "launcher.log",
            lambda _pid: _all_ready(ApiClient(url, api_key), replicas),
            f"{replicas} replicas were not ready within {start_timeout_s:g} s (--start-timeout)",
            start_timeout_s,
        ):
            yield url


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Run a Redis whose data and log are in an empty folder; the value is its URL.

    Raises:
        StartRefused: There is no server program, or it does not answer.
    """
    server = plan_redis(folder)
    with _running(
        server.command,
        {},
        folder / "redis.log",
        lambda pid: server.ready(pid) is not None,
        f"{server.binary} did not answer within {_REDIS_START_S:g} s",
        _REDIS_START_S,
    ):
        yield server.url


@contextmanager
def running_api(
    replicas: int, start_timeout_s: float, api_key: str, environment: Mapping[str, str]
) -> Iterator[str]:
    """Run one more API before replicas that run already; the value is its base URL.

    Args:
        replicas: How many replicas it must see ready.
        start_timeout_s: Seconds it may take until it does.
        api_key: The key it asks for, empty for none.
        environment: Its settings, with the `REDIS_URL` and `STAGE_CONFIGS_PATH` of the replicas.

    Raises:
        StartRefused: It does not come up in time, or says that it cannot.
    """
    with TemporaryDirectory(prefix="diffusion-api-") as name:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with _running(
            (sys.executable, "-m", "gunicorn", "--config", "python:api.server"),
            {"RUN_DIR": name, "API_PORT": str(port), **environment},
            Path(name) / "api.log",
            lambda _pid: _all_ready(ApiClient(url, api_key), replicas),
            f"the API did not see {replicas} ready replicas within {start_timeout_s:g} s",
            start_timeout_s,
        ):
            yield url


@contextmanager
def _running(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    is_ready: Callable[[int], bool],
    too_late: str,
    timeout_s: float,
) -> Iterator[None]:
    """Run one command from when it is ready, by its process id, until the block ends."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    process = ChildProcess(
        command,
        environment={**kept, **environment},
        folder=REPOSITORY,
        log=log,
        # It may have parts of its own to end, or a file to complete.
        orphan_signal=SIGTERM,
    )
    try:
        deadline = time.monotonic() + timeout_s
        while not is_ready(process.pid):
            if (status := process.poll()) is not None:
                raise StartRefused(f"the service ended with code {status}: {last_line(log)}")
            if time.monotonic() > deadline:
                raise StartRefused(f"{too_late}; its last line: {last_line(log)}")
            time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        _end(process)


def _all_ready(api: ApiClient, replicas: int) -> bool:
    listed = _replicas(api)
    for replica in listed:
        if replica["state"] == "failed":
            raise StartRefused(f"{replica['name']} failed: {replica['error']}")
    return [replica["state"] for replica in listed].count("ready") == replicas


def _replicas(api: ApiClient) -> list[dict[str, Any]]:
    try:
        return api.replicas()
    except (NoAnswer, Refused):  # not up yet
        return []


def _end(process: ChildProcess) -> None:
    """End a process and all its parts; asked again by Ctrl-C it is told to hurry."""
    process.terminate()
    deadline = time.monotonic() + _END_S
    while process.poll() is None:
        try:
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(_LOOK_EVERY_S / 3)
        except KeyboardInterrupt:
            process.terminate()
