"""What the stage sets on a pipeline: where its parts are, memory, attention, compiled blocks."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psutil
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_dispatch import AttentionBackendName

from configs.errors import ModelLoadFailed
from configs.stage_config import EngineArgs, PipelineSettings
from workers.devices.chunk import denoisers
from workers.devices.weights import DENOISERS
from workers.failures import short_cause
from workers.families import family_of
from workers.patches import keep_forward

_PINNED_SHARE: Final = 0.5
_logger = logging.getLogger(__name__)


def device_map_of(args: EngineArgs, device: str) -> str | None:
    """Return where weights are put as they are read; None is the host.

    A GPU gets them straight, one tensor after the other, where nothing is kept on the host. So the
    host never holds the model.
    """
    settings = args.pipeline
    if args.parallel_config.device_map is not None:
        return args.parallel_config.device_map
    if device == "cpu" or settings.enable_cpu_offload or settings.enable_layerwise_offload:
        return None
    return device


def place(pipe: Any, settings: PipelineSettings, device: torch.device) -> None:
    """Put the parts on `device`, or have them brought there when they are needed.

    Raises:
        ModelLoadFailed: The device or the family cannot offload.
    """
    if settings.enable_cpu_offload:
        _need_cuda("enable_cpu_offload", device)
        offload_parts(pipe, device)
    elif settings.enable_layerwise_offload:
        _need_cuda("enable_layerwise_offload", device)
        offload_layers(pipe, device)
    else:
        pipe.to(device)


def apply_settings(pipe: Any, settings: PipelineSettings) -> None:
    """Set what is of the parts as they were loaded, before they go to their devices.

    An autoencoder that can do nothing without tiles has them anyway.

    Raises:
        ModelLoadFailed: The family cannot take a setting.
    """
    if settings.vae_use_slicing:
        _switch_vae(pipe, "vae_use_slicing", "enable_slicing")
    if settings.vae_use_tiling or family_of(pipe).decodes_in_tiles:
        _switch_vae(pipe, "vae_use_tiling", "enable_tiling")
    if settings.channels_last:
        _use_channels_last(pipe)


def finish_settings(pipe: Any, settings: PipelineSettings) -> None:
    """Set what reaches other devices by the denoiser's own methods, once those are open.

    Raises:
        ModelLoadFailed: The family cannot take a setting, or a package is missing.
    """
    if settings.attention_backend is not None:
        _set_attention(pipe, settings.attention_backend)
    if settings.diffusion_compile_granularity == "regional":
        compile_blocks(pipe, dynamic=settings.diffusion_compile_dynamic)


def offload_parts(pipe: Any, device: torch.device) -> None:
    """Keep whole parts on the host, each on `device` from its turn to that of the next."""
    with refusing(
        "enable_cpu_offload", True, pipe, "leave it out, or use enable_layerwise_offload"
    ):
        pipe.enable_model_cpu_offload(device=device)


def offload_layers(pipe: Any, device: torch.device) -> None:
    """Keep denoisers and text encoders on the host, a block at a time on `device`.

    On CUDA the next block comes while the last one runs, out of memory of the host that is pinned:
    all weights are, unless these pages would be more than half of what the host has left; then each
    block is pinned in its turn, which is slower. The other parts, which are small, stay on the
    device.
    """
    streams = device.type == "cuda"
    with refusing(
        "enable_layerwise_offload", True, pipe, "leave it out, or use enable_cpu_offload"
    ):
        modules = {n: p for n, p in pipe.components.items() if isinstance(p, torch.nn.Module)}
        in_turn = streams and not may_pin(
            [part for name, part in modules.items() if _streams(name)],
            psutil.virtual_memory().available,
        )
        for name, part in modules.items():
            if name in DENOISERS:
                part.enable_group_offload(  # type: ignore[operator]
                    onload_device=device,
                    offload_type="block_level",
                    num_blocks_per_group=1,
                    non_blocking=streams,
                    use_stream=streams,
                    low_cpu_mem_usage=in_turn,
                )
                keep_forward(part)
            elif _streams(name):
                apply_group_offloading(
                    part,
                    onload_device=device,
                    offload_type="leaf_level",
                    non_blocking=streams,
                    use_stream=streams,
                    low_cpu_mem_usage=in_turn,
                )
            else:
                part.to(device)


def may_pin(parts: Iterable[torch.nn.Module], available: int) -> bool:
    """Tell whether the weights of `parts` may be pinned, with `available` bytes left on the host.

    Pinned pages cannot be swapped or given to another process, and while they are made the weights
    are there twice.
    """
    size = sum(
        each.numel() * each.element_size()
        for part in parts
        for each in (*part.parameters(), *part.buffers())
    )
    if size <= available * _PINNED_SHARE:
        return True
    _logger.warning(
        "enable_layerwise_offload: %.1f GB of weights are pinned block by block, which is slower: "
        "%.1f GB of host memory are free",
        size / 1e9,
        available / 1e9,
    )
    return False


def _streams(name: str) -> bool:
    return name in DENOISERS or name.startswith("text_encoder")


def compile_blocks(
    pipe: Any, *, dynamic: bool, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile the repeated blocks of the denoisers; they are built at their first call."""
    fix = "set it to none"
    with refusing("diffusion_compile_granularity", "regional", pipe, fix):
        for denoiser in _denoisers(pipe):
            denoiser.compile_repeated_blocks(dynamic=dynamic or None, backend=backend)


@contextmanager
def refusing(key: str, value: object, pipe: Any, fix: str) -> Iterator[None]:
    """Turn what is raised inside into a refusal of a key of `engine_args`."""
    try:
        yield
    except ModelLoadFailed:
        raise
    except Exception as error:
        raise _refusal(key, value, pipe, short_cause(error), fix) from error


def _denoisers(pipe: Any) -> list[Any]:
    return list(denoisers(pipe).values())


def _refusal(key: str, value: object, pipe: Any, reason: str, fix: str) -> ModelLoadFailed:
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return ModelLoadFailed(
        f"engine_args.{key}: {shown} does not go with {type(pipe).__name__}: {reason}; {fix}"
    )


def _need_cuda(key: str, device: torch.device) -> None:
    if device.type == "cpu":
        raise ModelLoadFailed(
            f"engine_args.{key}: true needs a CUDA device, and this replica runs on a CPU, where "
            "everything is on the host already; leave it out"
        )


def _switch_vae(pipe: Any, key: str, method: str) -> None:
    vae = pipe.components.get("vae")
    if not hasattr(vae, method):
        name = "no autoencoder" if vae is None else f"{type(vae).__name__} has no {method}"
        raise _refusal(key, True, pipe, name, "leave it out")
    with refusing(key, True, pipe, "leave it out"):
        getattr(vae, method)()


def _use_channels_last(pipe: Any) -> None:
    found = False
    for part in (*_denoisers(pipe), pipe.components.get("vae")):
        if not isinstance(part, torch.nn.Module):
            continue
        kinds = {type(layer) for layer in part.modules()}
        if torch.nn.Conv2d not in kinds:
            continue
        if any(weight.dim() == 5 for weight in part.parameters()):
            reason = f"{type(part).__name__} has convolutions over time"
            raise _refusal("channels_last", True, pipe, reason, "leave it out")
        untyped: Any = part
        untyped.to(memory_format=torch.channels_last)
        found = True
    if not found:
        raise _refusal("channels_last", True, pipe, "no convolution in it", "leave it out")


def _set_attention(pipe: Any, backend: str) -> None:
    known = {member.value for member in AttentionBackendName}
    if backend not in known:
        names = ", ".join(sorted(known))
        raise ModelLoadFailed(
            f"engine_args.attention_backend: {backend!r} is not available in diffusers; "
            f"use one of {names}"
        )
    fix = "install what it needs, or give another such as native"
    for denoiser in _denoisers(pipe):
        processors = [getattr(part, "processor", None) for part in denoiser.modules()]
        if not any(hasattr(processor, "_attention_backend") for processor in processors):
            reason = f"{type(denoiser).__name__} chooses its attention itself"
            raise _refusal("attention_backend", backend, pipe, reason, "leave it out")
        with refusing("attention_backend", backend, pipe, fix):
            denoiser.set_attention_backend(backend)
