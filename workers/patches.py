"""Every change that is made to objects of torch, diffusers, transformers and PEFT.

Others say what is to stand in a place; :func:`put` and :func:`become` put it there. Private names
of libraries are used here alone (ruff's SLF001). What is changed, for whom, its gain and its risk:

Speed. CPU time that a picture of the bundled model costs more without (64 x 64 pixels, 20 steps, on
and off by turns, medians of 60 to 80 pairs for 1 request and of 14 for 8 that share), on two shared
CPU cores that other work kept busy (quartiles 3 points to either side), 2026-11-30.
- `note_signatures`: attention processors say their signature at once; diffusers searches for it in
  each call of each layer. 5.6 % for 1, 1.4 % for 8. Breaks: nothing; it buys nothing if diffusers
  asks no more.
- `note_places`: parts are found without torch's `__getattr__`, and leaf layers go straight to their
  functions, past what torch does around `forward`. 13 %, a small DiT 19 % (16 pairs, 2026-12-01).
  Breaks: a deleted part stays; torch's global hooks are not called for these layers.
- `note_device`: a pipeline asks no module of its parts for its device: 2.5 %, 7 ms; small DiTs were
  slower without. Breaks: a pipeline that is moved while it serves.

One request, on its own copy of the pipeline; the model's own is never changed.
- `scheduler.step` (workers/engine/run.py): steps are seen and a run is ended there, since 47 of 238
  pipeline files of diffusers have no callback. Breaks: a pipeline that calls no step.
- `pipe.scheduler`, `pipe.maybe_free_model_hooks` (workers/engine/pipelines.py): a run has its own
  scheduler; none takes the offload's hooks off the parts of all.
- `scheduler.__class__` (workers/engine/schedulers.py): that of a flow model makes the steps of
  another solver. Breaks: a pipeline that reads more of it than a step gives.
- `pipe.encode_prompt` (features/prompt_cache.py): what was encoded before is not encoded again.
- Floats whose value changes (features/guidance.py): guidance changes while a request runs. Breaks:
  a pipeline that reads the scale once; that is noticed and stands in `warnings`.
- `vae.decode` (workers/engine/decoder.py): outputs of canceled requests of a batch are not decoded;
  short of memory it decodes one by one, then in tiles.
- `pipe.video_processor` (workers/engine/pipelines.py), with another `pt_to_numpy`: frames become
  bytes on the device. Breaks: another name for either; then floats are moved, as before.

Sharing of the denoiser.
- `forward` (workers/sharing/rendezvous.py): calls of several requests become one. (workers/devices/
  copies.py): rows of a call go to copies, or to groups of ranks.
- The methods of PEFT and of attention (workers/sharing/denoisers.py): adapters and attention reach
  copies and ranks. Breaks: a change by another method than those named there.
- `_resolve_parallel_config` (workers/devices/context_parallel.py): diffusers' context parallel on
  devices and meshes that it does not know. Breaks: another name; tests/engine/test_rank_groups.py
  fails.
- `gather_size_by_comm` (workers/devices/context_parallel.py): sizes of the parts of ranks are asked
  once for each kind of call, and not four times in each layer. Breaks: another name, with which
  diffusers asks as before; tests/engine/test_ranks.py counts it.

Weights and parts.
- `keep_forward`: diffusers' offload takes away nothing that stands over `forward`.
- `hold_dtype` (workers/engine/loading/dtypes.py): `encode`, `decode` and `to` of an autoencoder in
  another type than the denoiser's. 26 pipelines of diffusers bring one to float32 and back, and
  hand one that is in float32 already latents in half precision, which its layers refuse. Breaks:
  nothing where a pipeline casts them itself.
- `snapshot_download` (workers/engine/loading/download.py): while diffusers downloads a pipeline,
  one that looks at the disk first and counts bytes; diffusers hands through no class for its bars.
  Breaks: another name there; tests/engine/test_download.py fails.
- `ImageTextProcessor`: Qwen-Image-Edit loads without torchvision, which it needs for videos only.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.group_offloading import _is_group_offload_enabled
from diffusers.models import attention_dispatch
from transformers import Qwen2VLProcessor


class AlreadyPatched(RuntimeError):
    """Something stands over an attribute that another change would hide or take away."""


def put(owner: Any, name: str, new: Any, *, over: bool = False) -> Callable[[], None]:
    """Put `new` over an attribute of one object; returns what puts back what was there.

    Not by `setattr`, with which diffusers would write it into the configuration and torch among the
    parts. With `over` it may hide what was put on the object itself before.

    Raises:
        AlreadyPatched: Without `over`, the object has such an attribute of its own. Putting back
            raises it where something else has been put over `new` since.
    """
    own = vars(owner)
    had, before = name in own, own.get(name)
    if had and not over:
        raise AlreadyPatched(f"{type(owner).__name__}.{name} is replaced already")
    own[name] = new

    def restore() -> None:
        if own.get(name) is not new:
            raise AlreadyPatched(f"something else stands over {name} by now")
        if had:
            own[name] = before
        else:
            del own[name]

    return restore


@contextmanager
def patched(owner: Any, name: str, new: Any, *, over: bool = False) -> Iterator[None]:
    """Have `new` stand over an attribute meanwhile, as :func:`put` does it."""
    restore = put(owner, name, new, over=over)
    try:
        yield
    finally:
        restore()


def become(owner: Any, name: str, mixin: type, members: Mapping[str, Any]) -> None:
    """Make `owner` an instance of a class `name`: that of `mixin`, then its own, with `members`."""
    owner.__class__ = type(name, (mixin, type(owner)), dict(members))


def made_unset(kind: Any, config: Mapping[str, Any]) -> Any:
    """Return a scheduler of that class, whose constructor has set two timesteps at most.

    Some set those of all steps of the training, which no run uses: each sets its own.
    """

    def set_two(self: Any, *_: Any, **__: Any) -> None:
        kind.set_timesteps(self, 2)

    short: Any = type(kind.__name__, (kind,), {"set_timesteps": set_two})
    scheduler = short.from_config(config)
    scheduler.__class__ = kind
    return scheduler


@cache
def method_signature(function: Any) -> inspect.Signature:
    """Return the signature that a function has as the method of an object: without `self`."""
    own = inspect.signature(function)
    return own.replace(parameters=list(own.parameters.values())[1:])


def note_signatures(module: torch.nn.Module) -> None:
    """Write the signatures down on the processors of the module's parts; calls are as before.

    Only on the instances: pipelines that are not ours to change keep theirs. One that a part gets
    later is asked each time, as ever.
    """
    for part in module.modules():
        processor: Any = vars(part).get("processor")
        # A processor that is a module itself has hooks in its `__call__`.
        if processor is None or isinstance(processor, torch.nn.Module):
            continue
        call = processor.__call__
        if callable(call) and "__call__" not in getattr(processor, "__dict__", {"__call__": None}):
            noted: Any = partial(type(processor).__call__, processor)
            noted.__signature__ = inspect.signature(call)
            put(processor, "__call__", noted)


def note_places(module: torch.nn.Module) -> None:
    """Write down on each module where its parts and weights are; calls are as before.

    Parts and weights that are replaced by others later, as adapters and offloading do, are found as
    ever. For modules that serve only, and whose parts are not deleted.
    """
    for owner in module.modules():
        for name, part in owner._modules.items():
            # What the class has of that name is what Python finds today. Torch itself takes the
            # part out again when another is set in its place.
            if part is not None and not hasattr(type(owner), name):
                put(owner, name, part, over=True)
        forward = None if "forward" in vars(owner) else _straight(owner)
        if forward is not None:
            put(owner, "forward", forward)
            # Torch calls it in place of all that it does around `forward`, and copies it not.
            hooks, before = owner._forward_hooks, owner._forward_pre_hooks
            put(owner, "_compiled_call_impl", partial(_at_once, owner, forward, hooks, before))


# What a layer of exactly that class calls, and what it gives it before and after its weights.
_STRAIGHT: Mapping[type, tuple[Callable[..., Any], Sequence[str], Sequence[str]]] = {
    torch.nn.Linear: (torch.nn.functional.linear, (), ()),
    torch.nn.Conv2d: (torch.nn.functional.conv2d, (), ("stride", "padding", "dilation", "groups")),
    torch.nn.LayerNorm: (torch.layer_norm, ("normalized_shape",), ("eps",)),
    torch.nn.GroupNorm: (torch.group_norm, ("num_groups",), ("eps",)),
}


def _straight(layer: Any) -> Callable[..., Any] | None:
    if type(layer) is torch.nn.Dropout:
        return None if layer.training else _as_it_is
    if type(layer) is torch.nn.SiLU:
        return None if layer.inplace else torch.nn.functional.silu
    found = _STRAIGHT.get(type(layer))
    if found is None or getattr(layer, "padding_mode", "zeros") != "zeros":
        return None
    call, *given = found
    before, after = (tuple(getattr(layer, name) for name in names) for names in given)
    # The dictionary, for the weights in it may change. In a copy it is the copy's.
    return partial(_with_weights, call, layer._parameters, before, after)


# Torch calls it `input`, and so do those that name it (the linear layers of AnimateDiff's motion).
def _at_once(owner: Any, forward: Any, hooks: Any, before: Any, input: Any) -> Any:  # noqa: A002
    # Offloading and adapters may have put hooks on it since, or something over its `forward`.
    if hooks or before or owner.forward is not forward:
        return owner._call_impl(input)
    return forward(input)


def _with_weights(call: Any, weights: Any, before: Any, after: Any, input: Any) -> Any:  # noqa: A002
    return call(input, *before, weights["weight"], weights["bias"], *after)


def _as_it_is(input: Any) -> Any:  # noqa: A002
    return input


def note_device(pipe: Any) -> None:
    """Write down on a loaded pipeline which device it computes on; it stays there.

    It asks every module of every part for it in each call, and copies of it do so as well.
    """
    kind = type(pipe)
    own = {"_execution_device": pipe._execution_device, "__module__": kind.__module__}
    pipe.__class__ = type(kind.__name__, (kind,), own)


def keep_forward(module: torch.nn.Module) -> None:
    """Have nothing that diffusers' hooks do later change the `forward` of a module.

    The outermost of them puts back the `forward` that it found when it is removed, and with it
    takes away what was put over it since. One of the offload is there for the first call alone. So
    another is outermost from now on, which does nothing.
    """
    HookRegistry.check_if_exists_or_initialize(module).register_hook(ModelHook(), "outermost")


def is_group_offloaded(module: torch.nn.Module) -> bool:
    """Tell whether diffusers brings the module's weights, or those of its parts, by groups."""
    return bool(_is_group_offload_enabled(module))


def free_parts(pipe: Any) -> None:
    """Send the part that was used last back to the host; does nothing without the offload.

    diffusers' own `maybe_free_model_hooks` takes the hooks off and puts new ones on, which would
    also take off what stands before the denoiser, and is not called by a run that is interrupted.
    """
    for hook in getattr(pipe, "_all_hooks", ()):
        hook.offload()


def has_stateful_hooks(parts: Iterable[Any]) -> bool:
    """Tell whether such a hook is installed on one of the modules now, not counting their parts."""
    for part in parts:
        registry = vars(part).get("_diffusers_hook")
        if registry is not None:
            for hook in registry.hooks.values():
                if hook._is_stateful:
                    return True
    return False


def forget_state(modules: Iterable[Any]) -> None:
    """Empty the hooks of the modules; a pipeline does so itself, but not when it is stopped."""
    for module in modules:
        for part in module.modules():
            registry = vars(part).get("_diffusers_hook")
            if registry is not None:
                registry.reset_stateful_hooks(recurse=False)


def execution_device(pipe: Any) -> torch.device:
    """Return where a pipeline computes, wherever its parts are kept."""
    device: torch.device = pipe._execution_device
    return device


def counted_steps(pipe: Any) -> int | None:
    """Return the steps of its run that a pipeline counted, if it does so and has come so far."""
    steps: int | None = vars(pipe).get("_num_timesteps")
    return steps


def current_timestep(pipe: Any) -> Any:
    """Return the timestep that a pipeline's loop has come to."""
    return pipe._current_timestep


def share_plan(module: torch.nn.Module) -> Mapping[str, Any] | None:
    """Return diffusers' plan for sharing the sequence of a denoiser; None where it has none."""
    return getattr(module, "_cp_plan", None)


def share_by(module: torch.nn.Module, resolve: Callable[[Any], Any]) -> None:
    """Have `resolve` make a denoiser's parallel config of what it is given, and not diffusers.

    Its own knows accelerators only.
    """

    def resolved(given: Any) -> Any:
        whole = resolve(given)
        vars(module)["_parallel_config"] = whole
        return whole

    put(module, "_resolve_parallel_config", resolved)


def answer_part_sizes(answer: Callable[[int], list[int]]) -> None:
    """Have `answer` tell diffusers' attention the sizes of all ranks' parts, by that of this one.

    The whole process has one: it is a rank of one group that shares sequences.
    """

    def answered(size: int, group: Any) -> list[int]:
        return answer(size)

    put(attention_dispatch, "gather_size_by_comm", answered, over=True)


def shared_group(config: Any) -> Any:
    """Return the group of `torch.distributed` of a context parallel config that is in use."""
    return config._flattened_mesh.get_group()


def count_groups_anew() -> None:
    """Have torch name the next group like the first, where an earlier meeting failed."""
    untyped: Any = torch.distributed
    untyped.distributed_c10d._world.group_count = 0


def limit_collectives(limit: timedelta) -> None:
    """Give all groups of this process made so far this time limit.

    A mesh makes its own with torch's, which are 10 minutes on NCCL and 30 on gloo, and so do those
    who flatten it.
    """
    untyped: Any = torch.distributed
    distributed = untyped.distributed_c10d
    for group in list(distributed._world.pg_map):
        distributed._set_pg_timeout(limit, group)


class ImageTextProcessor(Qwen2VLProcessor):
    """The same, without videos; transformers reads from the signature what it is made of."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: Any = None,
        **options: Any,
    ) -> None:
        """Take the parts that :meth:`from_pretrained` loads."""
        self.image_token = "<|image_pad|>"  # noqa: S105 - a token of text
        self.video_token = "<|video_pad|>"  # noqa: S105
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        # Past the parent, which would ask for the part for videos.
        super(Qwen2VLProcessor, self).__init__(
            image_processor, tokenizer, chat_template=chat_template, **options
        )
