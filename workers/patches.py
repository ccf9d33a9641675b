"""Every change that is made to objects of torch, diffusers, transformers and PEFT.

Other modules say what is to stand in a place; :func:`put` and :func:`become` put it there. Private
names of libraries are used in this module alone (ruff's SLF001). What is changed, for whom, what it
buys and what would break it:

Speed. CPU time that a picture of the bundled model costs more without (64 x 64 pixels, 20 steps, on
and off by turns, medians of 60 to 80 pairs for 1 request and of 14 for 8 that share), on two shared
CPU cores that other work kept busy (quartiles 3 points to either side), 2026-11-30.
- `note_signatures`: attention processors say their signature at once; diffusers searches for it in
  each call of each layer. 5.6 % for 1, 1.4 % for 8. Breaks: nothing; it buys nothing if diffusers
  asks no more.
- `note_places`: parts are found without torch's `__getattr__` (4 %), and linear layers go straight
  to `torch.nn.functional.linear` (2 %). Both 7.5 % for 1, 4 % for 8. Breaks: a part that is deleted
  stays.
- Gone, since each bought 1 % or less: dropout and LayerNorm without their modules, layouts of calls
  remembered from step to step, the pipeline's device written into its class, signatures kept.

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
- `hold_dtype` (workers/engine/loader.py): `encode`, `decode` and `to` of an autoencoder in another
  type than the denoiser's. 26 pipelines of diffusers bring one to float32 and back, and hand one
  that is in float32 already latents in half precision, which its layers refuse. Breaks: nothing
  where a pipeline casts them itself.
- `snapshot_download` (workers/engine/loading/download.py): while diffusers downloads a pipeline,
  one that looks at the disk first and counts bytes; diffusers hands through no class for its bars.
  Breaks: another name there; tests/engine/test_download.py fails.
- `ImageTextProcessor`: Qwen-Image-Edit loads without torchvision, which it needs for videos only.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.group_offloading import _is_group_offload_enabled
from diffusers.models import attention_dispatch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils import BaseOutput
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
        if type(owner) is torch.nn.Linear and "forward" not in vars(owner):
            # The dictionary, for the weights in it may change. In a copy it is the copy's.
            put(owner, "forward", partial(_linear, owner._parameters))


# Torch calls it `input`, and so do those that name it (the linear layers of AnimateDiff's motion).
def _linear(weights: Mapping[str, Any], input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    return torch.nn.functional.linear(input, weights["weight"], weights["bias"])


def hold_dtype(vae: torch.nn.Module) -> None:
    """Have an autoencoder stay in its type and take tensors of others, as `encode` and `decode` do.

    What it encodes comes back in the type of what it was given, which the denoiser then gets; what
    it decodes stays as precise as it is.
    """
    encode: Any = getattr(vae, "encode", None)
    decode: Any = getattr(vae, "decode", None)
    move: Any = vae.to

    def to(*arguments: Any, **options: Any) -> Any:
        kept = [each for each in arguments if not isinstance(each, torch.dtype)]
        options.pop("dtype", None)
        return move(*kept, **options) if kept or options else vae

    def in_own(call: Any) -> Any:
        @wraps(call)
        def called(*arguments: Any, **options: Any) -> Any:
            own = next(vae.parameters()).dtype  # float32 in a run that is made once more
            named = {name: _as_dtype(value, own) for name, value in options.items()}
            return call(*(_as_dtype(each, own) for each in arguments), **named)

        return called

    def and_back(call: Any) -> Any:
        @wraps(call)
        def called(*arguments: Any, **options: Any) -> Any:
            given = next(filter(torch.is_tensor, (*arguments, *options.values())))
            return _as_dtype(call(*arguments, **options), given.dtype)

        return called

    put(vae, "to", to)
    if encode is not None:
        put(vae, "encode", and_back(in_own(encode)))
    if decode is not None:
        put(vae, "decode", in_own(decode))


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """The same with its tensors in that type: a tensor, a tuple, an output or a distribution."""
    if torch.is_tensor(value):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_as_dtype(each, dtype) for each in value)
    if isinstance(value, BaseOutput):
        return type(value)(**{name: _as_dtype(each, dtype) for name, each in value.items()})
    if isinstance(value, DiagonalGaussianDistribution):
        for name, each in vars(value).items():
            setattr(value, name, _as_dtype(each, dtype))
    return value


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
