"""Loads the diffusers pipeline of a replica onto its devices, with the settings of its stage."""

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_dispatch import AttentionBackendName

from configs.errors import ModelLoadFailed
from configs.stage_config import EngineArgs, PipelineSettings, ReplicaPlan
from workers.devices.chunk import denoisers
from workers.devices.weights import DENOISERS, quantized_arguments, weight_dtype
from workers.failures import is_out_of_memory, short_cause
from workers.families import family_of
from workers.patches import ImageTextProcessor, keep_forward

logger = logging.getLogger(__name__)


_REPLACED = ("transformers", "Qwen2VLProcessor")


def replaced_parts(index: Mapping[str, Any], model: str, **options: Any) -> dict[str, Any]:
    """Return the parts of a pipeline to load in place of those its `index` names.

    Empty where torchvision is there, and for pipelines without such a processor. `options` are
    those of `from_pretrained`.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return {}
    return {
        name: ImageTextProcessor.from_pretrained(model, subfolder=name, **options)
        for name, kind in index.items()
        if isinstance(kind, (list, tuple)) and tuple(kind) == _REPLACED
    }


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

    On CUDA the next block comes while the last one runs. The other parts, which are small, stay on
    the device.
    """
    streams = device.type == "cuda"
    with refusing(
        "enable_layerwise_offload", True, pipe, "leave it out, or use enable_cpu_offload"
    ):
        modules = {n: p for n, p in pipe.components.items() if isinstance(p, torch.nn.Module)}
        for name, part in modules.items():
            if name in DENOISERS:
                part.enable_group_offload(  # type: ignore[operator]
                    onload_device=device,
                    offload_type="block_level",
                    num_blocks_per_group=1,
                    non_blocking=streams,
                    use_stream=streams,
                )
                keep_forward(part)
            elif name.startswith("text_encoder"):
                apply_group_offloading(
                    part,
                    onload_device=device,
                    offload_type="leaf_level",
                    non_blocking=streams,
                    use_stream=streams,
                )
            else:
                part.to(device)


def compile_blocks(pipe: Any, *, dynamic: bool, backend: str = "inductor") -> None:
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


_OWN_CODE = "only pipelines of diffusers itself are served; save the model as one"


_OTHER_VERSION = "the class may need another version of diffusers than {diffusers}"


_DAMAGED = "it is damaged; download or copy the model again"


_NETWORK = "check the network, or give the path of a folder"


# Signs in the text of a failure or of its cause, and the fix. The first that is there counts.
_FIXES = (
    ("not one of the libraries", "only parts from diffusers and transformers are served"),
    ("custom code", _OWN_CODE),
    ("attribute name must be string", _OWN_CODE),
    ("such modeling files are", "leave engine_args.variant out, or name one that the model has"),
    ("diffusers has no attribute", _OTHER_VERSION),
    ("has no class", _OTHER_VERSION),
    ("gated repo", "accept the model's terms on the hub and set HF_TOKEN"),
    ("401 client error", "check the model id; a private model needs HF_TOKEN"),
    ("404 client error", "check the model id and engine_args.revision"),
    ("not fully cached", _NETWORK),
    ("timed out", _NETWORK),
    ("unable to load weights", _DAMAGED),
    ("not a valid json", _DAMAGED),
    ("no file named", "a file of the model is missing; download or copy the model again"),
    ("were passed", "a part that the pipeline needs is missing from model_index.json"),
    ("expected shape", "the weights do not belong to the configuration beside them"),
)


def load_pipeline(plan: ReplicaPlan) -> Any:
    """Return the pipeline of `plan`, ready on its devices, in evaluation mode.

    On CUDA the replica sees only its own chunk, as devices 0 to world_size - 1. The first holds the
    whole pipeline (``workers.devices.chunk`` gives the others work), unless the parts are
    spread by diffusers' `device_map="balanced"` (text encoders, denoiser and autoencoder on
    different devices, which adds memory and not speed). On CPU the chunk's cores become as many
    threads. `dtype: auto` is bfloat16 on CUDA and float32 on CPU, whatever type the weights were
    saved in. Weights load from safetensors where the model has them.

    Raises:
        ModelLoadFailed: Whatever went wrong, in one line with a fix.
    """
    args = plan.stage.engine_args
    try:
        return _load(plan, args)
    except ModelLoadFailed:
        raise
    except Exception as error:
        logger.exception("loading %s failed", args.model)
        message = _explain(args.model, error)
    # Raised out here, so that no traceback keeps half a model in memory.
    raise ModelLoadFailed(message)


def _load(plan: ReplicaPlan, args: EngineArgs) -> Any:
    untyped_diffusers: Any = diffusers
    untyped_transformers: Any = transformers
    untyped_diffusers.utils.logging.disable_progress_bar()
    untyped_transformers.utils.logging.disable_progress_bar()
    device = _device(args)
    spread = args.parallel_config.device_map is not None
    if spread and device == "cpu":
        raise ModelLoadFailed(
            f"{args.model}: parallel_config.device_map: balanced spreads parts over CUDA devices,"
            " and these are CPU cores; leave it out"
        )
    if device == "cpu":
        torch.set_num_threads(len(plan.devices))
    local = Path(args.model).is_dir()
    index = untyped_diffusers.DiffusionPipeline.load_config(args.model) if local else {}
    pipe = untyped_diffusers.DiffusionPipeline.from_pretrained(
        args.model,
        dtype=weight_dtype(args, device),
        variant=args.variant,
        revision=args.revision,
        local_files_only=local,
        **replaced_parts(index, args.model),
        **({"device_map": "balanced"} if spread else {}),
        **quantized_arguments(args, weight_dtype(args, device), device),
    )
    pipe.set_progress_bar_config(disable=True)
    apply_settings(pipe, args.pipeline)
    if not spread:
        place(pipe, args.pipeline, torch.device("cuda:0" if device == "cuda" else "cpu"))
    return pipe


def _device(args: EngineArgs) -> str:
    cuda = torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        raise ModelLoadFailed(
            f"{args.model}: engine_args.device is cuda and torch {torch.__version__} sees none;"
            " check the driver and CUDA_VISIBLE_DEVICES, or use device: cpu"
        )
    if args.device == "auto":
        return "cuda" if cuda else "cpu"
    return args.device


def _explain(model: str, error: Exception) -> str:
    cause = short_cause(error)
    if error.__cause__ is not None:
        cause = f"{cause} ({short_cause(error.__cause__)})"
    if is_out_of_memory(error):
        return f"{model}: too little memory to load it: {cause}; try a smaller dtype"
    if isinstance(error, ImportError):
        return f"{model}: a library is missing: {cause}; install it"
    text = f"{error} {error.__cause__}".lower()
    fix = next((fix for sign, fix in _FIXES if sign in text), "the replica's log has more")
    return f"{model}: {cause}; {fix.format(diffusers=diffusers.__version__)}"
