"""Diffusers' context parallel: the ranks of a group share the sequence of each denoiser call.

Where all lengths of a call divide by the ranks it is plain Ulysses (or a plain ring), in which
nobody asks how long the parts of the others are. Elsewhere the ranks ask each other once for each
kind of call: to ask is a collective, for whose answer the host waits for the device, and diffusers
does so four times in each layer (``gather_size_by_comm``, version 0.42).
"""

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.context_parallel import ContextParallelSplitHook
from diffusers.models._modeling_parallel import ContextParallelOutput

from configs.stage_config import ParallelConfig
from workers.families import manners_of
from workers.patches import answer_part_sizes, share_by, share_plan, shared_group

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


# Kinds of calls whose sizes are remembered; all are forgotten at once, so that all ranks do it.
_KINDS_KEPT = 64


class PartSizes:
    """How long the parts of all ranks are, asked as seldom as can be.

    To ask takes all ranks of the group together, so each must know beforehand what the others will
    do. They do the same because they run the same code on arguments of the same shapes, and what
    they go by is equal on all: those shapes, the whole lengths that were split so far, and how many
    times it was asked in this call. A rank's own length would not do, for two lengths may be equal
    on one rank and not on another. A call that fails may have ended at another place in each; so
    all forget then (:meth:`forget`).
    """

    def __init__(self) -> None:
        """There is no group yet."""
        self._group: Any = None
        self._world = self._rank = 0
        self._kinds: dict[Any, dict[Any, list[int]]] = {}
        self._known: dict[Any, list[int]] = {}
        self._lengths: tuple[int, ...] = ()
        self._asked = 0
        self._even = True

    def join(self, group: Any) -> None:
        """Answer for the parts of these ranks from here on, also to diffusers' attention."""
        self._group = group
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        untyped: Any = torch.compiler
        answer_part_sizes(untyped.disable(self.of))

    def begin(self, kind: Any) -> None:
        """Begin a call; `kind` is what its arguments are without their values."""
        if len(self._kinds) > _KINDS_KEPT:
            self._kinds.clear()
        self._known = self._kinds.setdefault(kind, {})
        self._lengths, self._asked, self._even = (), 0, True

    def split(self, length: int) -> bool:
        """Note that so long a sequence was split; tells whether all so far came out even."""
        if length not in self._lengths:
            self._lengths = (*self._lengths, length)
            self._even = self._even and length % self._world == 0
        return self._even

    def of(self, own: int) -> list[int]:
        """Return the lengths of the parts of all ranks, where this one's is `own`.

        Raises:
            RuntimeError: It is another than it was in an earlier call of this kind.
        """
        place = (self._lengths, self._asked)
        self._asked += 1
        if self._even:
            return [own] * self._world
        if place not in self._known:
            self._known[place] = gather_sizes(own, self._group)
        sizes = self._known[place]
        if sizes[self._rank] != own:
            raise RuntimeError(
                f"context parallel: a part of {own} where calls of this kind had"
                f" {sizes[self._rank]}; use cfg_parallel_size for this model"
            )
        return sizes

    def forget(self) -> None:
        """Ask anew; all ranks of the group do this after a call that failed in one of them."""
        self._kinds.clear()
        self._known = {}


def gather_sizes(own: int, group: Any) -> list[int]:
    """Return this number of each rank of the group; the host waits for the device."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    size = torch.tensor([own], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    found: list[int] = torch.cat(sizes).tolist()
    return found


def share_sequence(
    module: Any, parallel: ParallelConfig, mesh: Any, sizes: PartSizes | None = None
) -> None:
    """Have the module run its part of each call from here on; all ranks do this together.

    Every rank of `mesh`, which is `ring` x `ulysses`, then calls it with the same arguments and
    gets the whole output. Modules of one mesh have one `sizes`.

    Raises:
        ValueError: Its attention backend cannot do it.
    """
    ring, ulysses = parallel.ring_degree, parallel.ulysses_degree
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    if ring > 1 and all(_backend(part) is None for part in module.modules()):
        module.set_attention_backend(_RING_BACKEND)
    device = module.device

    def resolve(given: Any) -> Any:
        whole = diffusers.ParallelConfig(context_parallel_config=given)
        whole.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
        return whole

    share_by(module, resolve)
    module.enable_parallelism(config=config, cp_plan={})
    sizes = sizes or PartSizes()
    sizes.join(shared_group(config))
    lengths = _Lengths(config, sizes, even_heads=_heads_divide(module.config, ulysses))
    for name, entry in (share_plan(module) or {}).items():
        splits = isinstance(entry, dict)
        for part in _parts(module, name):
            hook = _Split(entry, config, lengths) if splits else _Gather(entry, config, sizes)
            HookRegistry.check_if_exists_or_initialize(part).register_hook(
                hook, f"{'split' if splits else 'gather'} {name}"
            )
    # Last, so that it stands before those that split the arguments.
    begin = _Begin(lengths, type(module).__name__)
    HookRegistry.check_if_exists_or_initialize(module).register_hook(begin, "begin")


def _heads_divide(config: Any, ulysses: int) -> bool:
    """Whether each kind of attention of a denoiser is known to have heads that divide."""
    heads = [
        count for name, count in config.items() if name.endswith("heads") and isinstance(count, int)
    ]
    return bool(heads) and not any(count % ulysses for count in heads)


class _Lengths:
    """Whether the call of a module has come to a length that does not divide by the ranks."""

    def __init__(self, config: Any, sizes: PartSizes, *, even_heads: bool) -> None:
        self._config = config
        self._sizes = sizes
        self._even_heads = even_heads

    def begin(self, kind: Any) -> None:
        self._sizes.begin(kind)
        self._go_by(even=True)

    def split(self, length: int) -> None:
        self._go_by(even=self._sizes.split(length))

    def _go_by(self, *, even: bool) -> None:
        """Choose diffusers' way; sequences of any length it has for one of the two at a time."""
        config = self._config
        if config.ring_degree == 1:
            config.ulysses_anything = not (even and self._even_heads)
        elif config.ulysses_degree == 1:
            config.ring_anything = not even


class _Begin(ModelHook):
    """Begins each call of a module."""

    def __init__(self, lengths: _Lengths, name: str) -> None:
        super().__init__()
        self._lengths = lengths
        self._name = name

    def pre_forward(self, _module: Any, *args: Any, **kwargs: Any) -> Any:
        """Describe the arguments, which are whole, and leave them as they are."""
        self._lengths.begin((self._name, _kind(args), _kind(kwargs)))
        return args, kwargs


class _Split(ContextParallelSplitHook):
    """Takes this rank's part of a layer's arguments or outputs."""

    def __init__(self, entry: Any, config: Any, lengths: _Lengths) -> None:
        super().__init__(entry, config)
        self._lengths = lengths

    def _prepare_cp_input(self, x: torch.Tensor, cp_input: Any) -> torch.Tensor:
        if cp_input.expected_dims is None or x.dim() == cp_input.expected_dims:
            self._lengths.split(x.shape[cp_input.split_dim])
        part: torch.Tensor = super()._prepare_cp_input(x, cp_input)
        return part


class _Gather(ModelHook):
    """Puts the parts of a layer's outputs together again."""

    def __init__(self, entry: Any, config: Any, sizes: PartSizes) -> None:
        super().__init__()
        self._outputs: Sequence[ContextParallelOutput | None] = (
            entry if isinstance(entry, (list, tuple)) else [entry]
        )
        self._group = shared_group(config)
        self._sizes = sizes

    def post_forward(self, _module: Any, output: Any) -> Any:
        """Return the output whole."""
        alone = isinstance(output, torch.Tensor)
        parts = [output] if alone else list(output)
        whole = [
            part if plan is None else self._whole(part, plan.gather_dim)
            for part, plan in zip(parts, self._outputs, strict=True)
        ]
        return whole[0] if alone else tuple(whole)

    def _whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return gather_parts(part, dim, self._sizes.of(part.shape[dim]), self._group)


def gather_parts(part: torch.Tensor, dim: int, sizes: Sequence[int], group: Any) -> torch.Tensor:
    """Return the parts of all ranks of the group, so long along `dim`, one behind the other."""
    front = part.movedim(dim, 0).contiguous()
    if len(front) < max(sizes):  # gloo gathers parts of one size only
        padded = front.new_zeros((max(sizes), *front.shape[1:]))
        padded[: len(front)] = front
        front = padded
    gathered = [torch.empty_like(front) for _ in sizes]
    dist.all_gather(gathered, front, group=group)
    whole = torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()


def _kind(value: Any) -> Any:
    """What a value is, by what all ranks have alike: never by numbers that change with the step."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return "other"


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
