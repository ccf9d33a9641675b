"""What is checked before anything is started: ports, addresses, the stage file."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

from configs.devices import check_machine
from configs.machine import detect_machine
from configs.settings import Settings
from configs.stage_config import ReplicaPlan, StageConfig
from configs.stages import load_stages, plan_replicas
from routing.replica import Heartbeat, Registry, ReplicaState


class StartRefused(Exception):
    """Raised when this machine or the network lacks something; exit code 1."""


_ALIVE = frozenset({ReplicaState.LOADING, ReplicaState.READY, ReplicaState.DRAINING})


def check_stages(
    settings: Settings, model: str | None, environ: Mapping[str, str]
) -> tuple[tuple[StageConfig, ...], tuple[ReplicaPlan, ...]]:
    """Read the stage file and plan its replicas.

    Args:
        settings: Name the stage file and the number of the first replica.
        model: Folder or hub id in place of the one in the file, if given.
        environ: The environment, in which CUDA_VISIBLE_DEVICES may narrow the devices.

    Raises:
        ConfigurationError: The file, the model's folder or a device is refused.
    """
    stages = load_stages(settings.stage_configs_path, model)
    check_machine(stages, detect_machine(environ, cpu_devices=settings.cpu_devices))
    return stages, plan_replicas(stages, settings.replica_offset)


def check_ports(settings: Settings) -> None:
    """Check that the API and Flower can listen where they should.

    Raises:
        StartRefused: A port is in use, or an address is not one of this machine.
    """
    api = (settings.api_host, settings.api_port)
    if settings.api_port == settings.flower_port:
        raise StartRefused(
            f"the API and Flower cannot both have port {settings.api_port}; change one of "
            "them (--port or API_PORT; FLOWER_PORT)"
        )
    _check_port("the API", *api, "--port or API_PORT", "--host or API_HOST")
    _check_port("Flower", "127.0.0.1", settings.flower_port, "FLOWER_PORT", "")


def check_names(registry: Registry, plans: Sequence[ReplicaPlan]) -> None:
    """Check that no other launcher's replicas have our names, on a Redis that hosts share.

    Raises:
        StartRefused: A living process has one of the names.
    """
    planned = {plan.name for plan in plans}
    for replica in registry.all():
        heartbeat = replica.heartbeat
        if replica.name in planned and replica.state in _ALIVE and _lives(heartbeat):
            raise StartRefused(
                f"{replica.name} already runs on {heartbeat.host} (pid {heartbeat.pid}) with this "
                "Redis; stop it, or set REPLICA_OFFSET to the first free number, or REDIS_PREFIX "
                "for a separate service"
            )


def is_loopback(host: str) -> bool:
    """Whether a server that listens on ``host`` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_port(what: str, host: str, port: int, port_option: str, host_option: str) -> None:
    try:
        kind, protocol, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(kind, protocol, number) as probe:
            # As the servers do: a port whose last connections are still closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except PermissionError:
        fault = f"may not listen on port {port}; choose one above 1023 ({port_option})"
    except socket.gaierror as error:
        fault = f"cannot listen on {host!r}: {error.strerror}; choose another ({host_option})"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fault = f"cannot listen on port {port}: it is in use; choose another ({port_option})"
        else:
            fault = f"cannot listen on {host}: {error.strerror}; choose another ({host_option})"
    else:
        return
    raise StartRefused(f"{what} {fault}")


def _lives(heartbeat: Heartbeat) -> bool:
    """Whether the process lives; on another host its unexpired heartbeat must do."""
    if heartbeat.host != socket.gethostname():
        return True
    try:
        os.kill(heartbeat.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
