"""Diffusers' context parallel on a denoiser: each rank runs a part of the sequence of every call.

It does what `enable_parallelism` does and works on CPU cores and for sequences of any length too,
where that does not: diffusers asks for an accelerator, and gathers parts of different lengths in a
way that gloo refuses. Does not know processes and calls; `torch.distributed` must have been set up.
"""

from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models._modeling_parallel import ContextParallelOutput

from configs import stages

# The ring needs the log-sum-exp of attention, which torch's own choice of a kernel does not give.
_RING_BACKEND = "_native_cudnn"
_RING_TYPES = (torch.bfloat16, torch.float16)
# Their attention masks have an entry for each head, which no rank cuts (diffusers 0.42.1).
_BROKEN = frozenset(("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel"))


def refusal(module: Any, parallel: stages.ParallelConfig) -> str | None:
    """Return why this denoiser can not be shared so, with a mend; None where it can."""
    name = type(module).__name__
    if getattr(module, "_cp_plan", None) is None or name in _BROKEN:
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


def share_sequence(module: Any, parallel: stages.ParallelConfig, mesh: Any) -> None:
    """Have the module run its part of each call from here on; all ranks do this together.

    Every rank of `mesh`, which is `ring` x `ulysses`, then calls it with the same arguments and
    gets the whole output.

    Raises:
        ValueError: Its attention backend can not do it.
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
        """In place of diffusers' own, which knows accelerators only."""
        whole = ParallelConfig(context_parallel_config=given)
        whole.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
        module._parallel_config = whole
        return whole

    inputs = {name: entry for name, entry in module._cp_plan.items() if isinstance(entry, dict)}
    outputs = {name: entry for name, entry in module._cp_plan.items() if name not in inputs}
    module._resolve_parallel_config = resolve
    module.enable_parallelism(config=config, cp_plan=inputs)
    group = config._flattened_mesh.get_group()
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
