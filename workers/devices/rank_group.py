"""The `torch.distributed` groups of a replica's ranks: gloo on CPU cores, NCCL on CUDA devices.

All ranks are on one host and meet at a TCP store of rank 0 on the loopback address.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from configs.stages import ParallelConfig

# A collective that takes longer has lost its partner. Ranks wait for calls outside of any.
COLLECTIVE_S = 240.0
_HOST = "127.0.0.1"


def open_store(world_size: int) -> Any:
    """Open the meeting place on a free port; rank 0 does this before the others are told."""
    untyped: Any = dist
    return untyped.TCPStore(_HOST, 0, world_size, is_master=True, wait_for_workers=False)


def join_group(
    rank: int, world_size: int, port: int, device: torch.device, store: Any = None
) -> None:
    """Make the default group of this process; returns when all ranks have come."""
    untyped: Any = dist
    timeout = timedelta(seconds=COLLECTIVE_S)
    if store is None:
        store = untyped.TCPStore(_HOST, port, world_size, is_master=False, timeout=timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def rank_groups(parallel: ParallelConfig) -> list[range]:
    """Return the ranks of each group that shares the sequence of a call; groups share its rows."""
    size = parallel.context_degree
    return [range(first, first + size) for first in range(0, parallel.world_size, size)]


def open_mesh(device: torch.device, parallel: ParallelConfig) -> Any:
    """Return the mesh of this rank's group, `ring` x `ulysses`; all ranks do this together."""
    mesh: Any = init_device_mesh(
        device.type,
        (parallel.cfg_parallel_size, parallel.ring_degree, parallel.ulysses_degree),
        mesh_dim_names=("cfg", "ring", "ulysses"),
    )
    return mesh["ring", "ulysses"]
