"""What is checked before anything is started: ports, addresses, the stage file."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from configs.devices import check_machine
from configs.machine import ROOT, Machine, detect_machine, gpu_memory_bytes
from configs.settings import Settings
from configs.stage_config import ReplicaPlan, StageConfig
from configs.stages import load_stages, plan_replicas, reference_document, stages_of
from routing.replica import Heartbeat, Registry, ReplicaState
from scripts.launcher.model_alone import account, fit, stage_document, weights_of


class StartRefused(Exception):
    """Raised when this machine or the network lacks something; exit code 1."""


_ALIVE = frozenset({ReplicaState.LOADING, ReplicaState.READY, ReplicaState.DRAINING})


@dataclass(frozen=True)
class Planned:
    """What is to be served.

    Attributes:
        document: The stage file in the reference's dialect.
        stages: What it says.
        plans: Its replicas.
        said: How the stage was chosen, where no file says it.
    """

    document: Mapping[Any, Any]
    stages: tuple[StageConfig, ...]
    plans: tuple[ReplicaPlan, ...]
    said: str | None = None


def check_stages(
    settings: Settings,
    model: str | None,
    environ: Mapping[str, str],
    *,
    alone: bool = False,
    root: Path = ROOT,
) -> Planned:
    """Read the stage file, or make one for a model that is given alone, and plan its replicas.

    Args:
        settings: Name the stage file and the number of the first replica.
        model: Folder or hub id in place of the one in the file, if given.
        environ: The environment, in which CUDA_VISIBLE_DEVICES may narrow the devices.
        alone: Whether nobody named a stage file: on a host with GPUs the model gets a stage of its
            own, on them.
        root: Where `/dev` and `/proc` are.

    Raises:
        ConfigurationError: The file, the model's folder or a device is refused.
    """
    machine = detect_machine(environ, root, settings.cpu_devices)
    said = None
    if alone and model is not None and machine.kind == "cuda":
        document, said = _made_for(model, machine, root)
        stages = stages_of(document, f"the stage of {model}")
    else:
        stages = load_stages(settings.stage_configs_path, model)
        document = reference_document(settings.stage_configs_path)
    check_machine(stages, machine)
    return Planned(document, stages, plan_replicas(stages, settings.replica_offset), said)


def _made_for(model: str, machine: Machine, root: Path) -> tuple[dict[str, Any], str]:
    weights, gpu_bytes = weights_of(model), gpu_memory_bytes(machine, root)
    # A host whose GPUs cannot be used has none to count, and is refused by check_machine.
    fitting = fit(weights, max(machine.cuda_count, 1), gpu_bytes, psutil.virtual_memory().total)
    return stage_document(model, fitting), account(model, weights, gpu_bytes, fitting)


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
