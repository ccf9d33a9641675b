"""The `torch.distributed` groups of a replica's ranks, and diffusers' context parallel on them."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models._modeling_parallel import ContextParallelOutput
from torch.distributed.device_mesh import init_device_mesh

from configs.stage_config import ParallelConfig
from workers.families import manners_of
from workers.patches import (
    count_groups_anew,
    limit_collectives,
    share_by,
    share_plan,
    shared_group,
)

# The ring needs the log-sum-exp of attention, which torch's own choice of a kernel does not give.
_RING_BACKEND = "_native_cudnn"


_RING_TYPES = (torch.bfloat16, torch.float16)


def refusal(module: Any, parallel: ParallelConfig) -> str | None:
    """Return why this denoiser cannot be shared so, with a fix; None where it can."""
    name = type(module).__name__
    if share_plan(module) is None or not manners_of(module).divides_sequence:
        return (
            f"diffusers has no working plan for sharing the sequence of {name};"
            " use cfg_parallel_size, which shares the rows of its calls"
        )
    if parallel.ring_degree > 1 and (
        module.device.type != "cuda" or module.dtype not in _RING_TYPES
    ):
        return (
            f"ring_degree {parallel.ring_degree} needs CUDA devices and dtype bfloat16 or float16;"
            " use ulysses_degree"
        )
    heads = getattr(module.config, "num_attention_heads", None)
    if isinstance(heads, int) and heads < parallel.ulysses_degree:
        return f"ulysses_degree {parallel.ulysses_degree} is more than the {heads} heads of {name}"
    if isinstance(heads, int) and parallel.ring_degree > 1 and heads % parallel.ulysses_degree:
        return (
            f"ulysses_degree {parallel.ulysses_degree} with a ring must divide the {heads} heads"
            f" of {name}"
        )
    return None


def share_sequence(module: Any, parallel: ParallelConfig, mesh: Any) -> None:
    """Have the module run its part of each call from here on; all ranks do this together.

    Every rank of `mesh`, which is `ring` x `ulysses`, then calls it with the same arguments and
    gets the whole output.

    Raises:
        ValueError: Its attention backend cannot do it.
    """
    ring, ulysses = parallel.ring_degree, parallel.ulysses_degree
    config = ContextParallelConfig(
        ring_degree=ring,
        ulysses_degree=ulysses,
        # Sequences of any length, which diffusers has for one of the two at a time.
        ulysses_anything=ring == 1,
        ring_anything=ulysses == 1,
    )
    if ring > 1 and all(_backend(part) is None for part in module.modules()):
        module.set_attention_backend(_RING_BACKEND)
    device = module.device

    def resolve(given: Any) -> Any:
        whole = diffusers.ParallelConfig(context_parallel_config=given)
        whole.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
        return whole

    plan = share_plan(module) or {}
    inputs = {name: entry for name, entry in plan.items() if isinstance(entry, dict)}
    outputs = {name: entry for name, entry in plan.items() if name not in inputs}
    share_by(module, resolve)
    module.enable_parallelism(config=config, cp_plan=inputs)
    group = shared_group(config)
    for name, entry in outputs.items():
        for part in _parts(module, name):
            hook = _Gather(entry if isinstance(entry, (list, tuple)) else [entry], group)
            HookRegistry.check_if_exists_or_initialize(part).register_hook(hook, f"gather {name}")


def gather_parts(part: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """Return the parts of all ranks of the group, one behind the other along `dim`."""
    world = dist.get_world_size(group)
    length = torch.tensor([part.shape[dim]], device=part.device)
    lengths = [torch.empty_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group=group)
    sizes = torch.cat(lengths).tolist()
    front = part.movedim(dim, 0)
    padded = front.new_zeros((max(sizes), *front.shape[1:]))
    padded[: len(front)] = front
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded, group=group)
    whole = torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()


class _Gather(ModelHook):
    """Puts the parts of a layer's outputs together again."""

    def __init__(self, outputs: Any, group: Any) -> None:
        super().__init__()
        self._outputs: list[ContextParallelOutput | None] = list(outputs)
        self._group = group

    def post_forward(self, _module: Any, output: Any) -> Any:
        """Return the output whole."""
        alone = isinstance(output, torch.Tensor)
        parts = [output] if alone else list(output)
        whole = [
            part if plan is None else gather_parts(part, plan.gather_dim, self._group)
            for part, plan in zip(parts, self._outputs, strict=True)
        ]
        return whole[0] if alone else tuple(whole)


def _parts(module: Any, name: str) -> list[Any]:
    """The modules of that name in a plan, where `*` stands for each of a list."""
    found = [module]
    for step in name.split(".") if name else []:
        if step == "*":
            found = [inner for each in found for inner in each]
        else:
            found = [getattr(each, step) for each in found]
    return found


def _backend(part: Any) -> Any:
    return getattr(getattr(part, "processor", None), "_attention_backend", None)


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
    store: Any = None,
) -> None:
    """Meet the other ranks, and have the denoisers share their sequences in groups of several.

    All do this at the same time; rank 0 brings the store.
    """
    device = next(iter(denoisers.values())).device
    _join_group(rank, parallel, port, device, store)
    if parallel.context_degree > 1:
        mesh = _open_mesh(device, parallel)
        for module in denoisers.values():
            share_sequence(module, parallel, mesh)
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
