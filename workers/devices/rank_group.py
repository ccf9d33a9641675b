"""The `torch.distributed` groups of a replica's ranks."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from configs.stage_config import ParallelConfig
from workers.devices.context_parallel import PartSizes, share_sequence
from workers.patches import count_groups_anew, limit_collectives

_HOST = "127.0.0.1"


# As many may come before the first is let in.
_BACKLOG = 1024


def open_store(world_size: int) -> Any:
    """Open the meeting place on a free port; rank 0 does this before the others are told."""
    # By its own choice the store would listen on every address of the host.
    listening = socket.create_server((_HOST, 0), backlog=_BACKLOG)
    port = listening.getsockname()[1]
    untyped: Any = dist
    return untyped.TCPStore(
        _HOST,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def meet(
    rank: int,
    parallel: ParallelConfig,
    port: int,
    denoisers: Mapping[str, Any],
    sizes: PartSizes,
    store: Any = None,
) -> None:
    """Meet the other ranks, and have the denoisers share their sequences in groups of several.

    All do this at the same time; rank 0 brings the store. `sizes` are forgotten after a call that
    failed.
    """
    device = next(iter(denoisers.values())).device
    _join_group(rank, parallel, port, device, store)
    if parallel.context_degree > 1:
        mesh = _open_mesh(device, parallel)
        for module in denoisers.values():
            share_sequence(module, parallel, mesh, sizes)
    limit_collectives(timedelta(seconds=parallel.collective_timeout_s))


def rank_groups(parallel: ParallelConfig) -> list[range]:
    """Return the ranks of each group that shares the sequence of a call; groups share its rows."""
    size = parallel.context_degree
    return [range(first, first + size) for first in range(0, parallel.world_size, size)]


def _join_group(
    rank: int, parallel: ParallelConfig, port: int, device: torch.device, store: Any
) -> None:
    """Make the default group of this process; returns when all ranks have come."""
    untyped: Any = dist
    world_size, timeout = parallel.world_size, timedelta(seconds=parallel.collective_timeout_s)
    if store is None:
        store = untyped.TCPStore(_HOST, port, world_size, is_master=False, timeout=timeout)
    store.set_timeout(timeout)
    if device.type == "cpu" and (loopback := _loopback()):
        # gloo would take the address of the host's name, which need not be one of this host.
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    # The name under which they meet: torch counts on where an earlier meeting of a process failed.
    count_groups_anew()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def _open_mesh(device: torch.device, parallel: ParallelConfig) -> Any:
    """Return the mesh of this rank's group, `ring` x `ulysses`; all ranks do this together."""
    mesh: Any = init_device_mesh(
        device.type,
        (parallel.cfg_parallel_size, parallel.ring_degree, parallel.ulysses_degree),
        mesh_dim_names=("cfg", "ring", "ulysses"),
    )
    return mesh["ring", "ulysses"]


def _loopback() -> str | None:
    """The host's loopback interface: `lo` on Linux, `lo0` elsewhere."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
