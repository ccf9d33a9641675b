"""The parts of a running service, and the command of each."""

from __future__ import annotations

import http.client
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from redis.exceptions import RedisError

from configs.errors import EXIT_LASTING
from configs.settings import Settings
from configs.stage_config import ReplicaPlan
from routing.broker import WEBHOOK_QUEUE, Broker
from routing.replica import Registry, Replica, ReplicaState
from scripts.launcher.redis_server import RedisServer


def no_reason(_pid: int) -> str | None:
    """Return None: nothing is known about what the process does, or why it failed."""
    return None


@dataclass(frozen=True)
class Part:
    """One process of the service.

    Attributes:
        name: ``redis``, ``replica0``, ``api``; also the name of its log.
        command: The command line, its first word a program.
        ready: Given the process id, says what is ready, or None while it is not; must return soon.
        failure: Given the process id, says why it failed, or None where that is not known.
        activity: Given the process id, says what it does until it is ready, if that is known.
        final_exits: Exit codes after which it is not started again: the next start would fail too.
        environment: Variables added to those of the launcher; one that is None is removed.
        stop_order: Parts with a lower number are asked to end before those with a higher one.
        grace_s: Seconds it has to end after it was asked to.
        head_start_s: Seconds after which those of the next order are asked to end beside it; None:
            only once it has ended.
        orphan_signal: What it is sent when the launcher dies without stopping it.
    """

    name: str
    command: tuple[str, ...]
    ready: Callable[[int], str | None]
    failure: Callable[[int], str | None] = no_reason
    activity: Callable[[int], str | None] = no_reason
    final_exits: frozenset[int] = frozenset()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    stop_order: int = 0
    grace_s: float = 5.0
    head_start_s: float | None = None
    orphan_signal: signal.Signals = signal.SIGKILL


_API, _WORK, _STORE = range(3)  # the order in which they end


# All graces together stay below ten seconds, which is what a container has. Each API process
# closes kept-alive connections 2 s after it was asked to end (gunicorn), those that never sent a
# byte after 5 s, and gives calls in flight 8 s (api/server.py); Python's own end takes about one
# more. Meanwhile the workers end: each needs its drain, a second to notice the signal, and one to
# take torch down.
_API_HEAD_START_S: Final = 0.5


_API_GRACE_S: Final = 8.6


_WORK_GRACE_S: Final = 7.8


_AFTER_DRAIN_S: Final = 2.8


_STORE_GRACE_S: Final = 1.0


_LOOK_S: Final = 0.3


_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104


def redis_part(server: RedisServer) -> Part:
    """Our own Redis: the first to start and the last to end."""
    return Part(
        name="redis",
        command=server.command,
        ready=server.ready,
        stop_order=_STORE,
        grace_s=_STORE_GRACE_S,
        # It ends by SIGTERM with its file complete, whatever the others are doing.
        orphan_signal=signal.SIGTERM,
    )


def worker_part(plan: ReplicaPlan, settings: Settings, registry: Registry) -> Part:
    """The worker that is one replica; its devices, pool and name follow from the queue's name."""
    return Part(
        name=plan.name,
        command=(*_celery("worker"), "-Q", plan.name, "-l", "WARNING", "-E"),
        ready=lambda pid: _ready_replica(registry, plan.name, pid),
        failure=lambda pid: _failure(registry, plan.name, pid),
        activity=lambda pid: _activity(registry, plan.name, pid),
        final_exits=frozenset({EXIT_LASTING}),
        stop_order=_WORK,
        grace_s=max(_WORK_GRACE_S, settings.drain_s + _AFTER_DRAIN_S),
    )


def api_part(settings: Settings) -> Part:
    """The API's server; it answers the calls it holds before the replicas are asked to end."""
    host, port = reachable(settings.api_host), settings.api_port
    return Part(
        name="api",
        command=(sys.executable, "-m", "gunicorn", "--config", "python:api.server"),
        ready=lambda _pid: base_url(host, port) if _is_healthy(host, port) else None,
        stop_order=_API,
        grace_s=_API_GRACE_S,
        head_start_s=_API_HEAD_START_S,
        # Its master has processes of its own to end.
        orphan_signal=signal.SIGTERM,
    )


def flower_part(settings: Settings) -> Part:
    """Flower, on loopback: its figures and pages are open to whoever reaches them."""
    host, port = "127.0.0.1", settings.flower_port
    return Part(
        name="flower",
        command=(*_celery("flower"), f"--address={host}", f"--port={port}"),
        ready=lambda _pid: base_url(host, port) if _listens(host, port) else None,
        environment={"FLOWER_UNAUTHENTICATED_API": None},
        stop_order=_WORK,
    )


def webhook_part(broker: Broker) -> Part:
    """The worker that sends webhooks, on a queue of its own."""
    node = f"{WEBHOOK_QUEUE}@{socket.gethostname()}"
    options = ("-Q", WEBHOOK_QUEUE, "-n", node, "-l", "WARNING")
    return Part(
        name=WEBHOOK_QUEUE,
        command=(*_celery("worker", "api.webhooks.worker"), *options),
        ready=lambda _pid: "sends due webhooks" if broker.answers(node) else None,
        stop_order=_WORK,
    )


def parts_environment(settings: Settings) -> Mapping[str, str]:
    """Return the variables by which every part sees the same settings as the launcher."""
    return {
        "REDIS_URL": settings.redis_url,
        "STAGE_CONFIGS_PATH": str(settings.stage_configs_path),
        "OUTPUTS_URL": settings.outputs_url,
        "API_HOST": settings.api_host,
        "API_PORT": str(settings.api_port),
        "PYTHONUNBUFFERED": "1",
    }


def reachable(host: str) -> str:
    """Return the address at which this host reaches a server that listens on ``host``."""
    return _ANYWHERE.get(host, host)


def base_url(host: str, port: int) -> str:
    """Return the URL of a server, an IPv6 address in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _celery(command: str, app: str = "workers") -> tuple[str, ...]:
    return (sys.executable, "-m", "celery", "-A", app, command)


def _read(registry: Registry, name: str, pid: int) -> Replica | None:
    """What the registry says of the replica, if that is about this very process."""
    with suppress(RedisError):
        replica = registry.get(name)
        if replica is not None and replica.heartbeat.pid == pid:
            return replica
    return None


def _ready_replica(registry: Registry, name: str, pid: int) -> str | None:
    replica = _read(registry, name, pid)
    if replica is None or replica.state not in {ReplicaState.READY, ReplicaState.DRAINING}:
        return None
    heartbeat = replica.heartbeat
    noun = "cpu core" if heartbeat.device_kind == "cpu" else "cuda device"
    where = (
        f"{noun}{'s' if len(heartbeat.devices) > 1 else ''} {','.join(map(str, heartbeat.devices))}"
    )
    # A drained replica stays so over a restart, until somebody resumes it.
    drained = ", drained" if replica.state is ReplicaState.DRAINING else ""
    return f"{heartbeat.model} on {where}{drained}"


def _failure(registry: Registry, name: str, pid: int) -> str | None:
    replica = _read(registry, name, pid)
    # The reason of the last process stays on record while the next one loads.
    failed = replica is not None and replica.state is ReplicaState.FAILED
    return replica.heartbeat.error if replica is not None and failed else None


def _activity(registry: Registry, name: str, pid: int) -> str | None:
    replica = _read(registry, name, pid)
    return replica.heartbeat.activity if replica is not None else None


def _is_healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=_LOOK_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_LOOK_S):
            return True
    except OSError:
        return False
