"""Loads the diffusers pipeline of a replica onto its devices, with the settings of its stage."""

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from configs.errors import ModelLoadFailed
from configs.machine import why_no_cuda
from configs.stage_config import EngineArgs, ReplicaPlan
from workers.devices.chunk import denoisers
from workers.devices.weights import quantized_arguments, weight_dtype
from workers.engine.loading.dtypes import Dtypes, with_dtypes
from workers.engine.loading.settings import apply_settings, place
from workers.failures import is_out_of_memory, short_cause
from workers.patches import ImageTextProcessor, hold_dtype

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
    ("safetensorerror", _DAMAGED),
    ("not a valid json", _DAMAGED),
    ("no file named", "a file of the model is missing; download or copy the model again"),
    ("were passed", "a part that the pipeline needs is missing from model_index.json"),
    ("expected shape", "the weights do not belong to the configuration beside them"),
)


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline on its devices.

    Attributes:
        pipe: The pipeline.
        plan: As it was loaded: with the type of each part in place of `auto`.
        dtypes: These types, and where they are from.
    """

    pipe: Any
    plan: ReplicaPlan
    dtypes: Dtypes


def load_pipeline(plan: ReplicaPlan) -> Any:
    """Return the pipeline alone that :meth:`load` loads."""
    return load(plan).pipe


def load(plan: ReplicaPlan) -> LoadedPipeline:
    """Load the pipeline of `plan`, ready on its devices, in evaluation mode.

    On CUDA the replica sees only its own chunk, as devices 0 to world_size - 1. The first holds the
    whole pipeline (``workers.devices.chunk`` gives the others work), unless the parts are
    spread by diffusers' `device_map="balanced"` (text encoders, denoiser and autoencoder on
    different devices, which adds memory and not speed). On CPU the chunk's cores become as many
    threads. What `dtype: auto` is for each part: ``workers.engine.loading.dtypes``. Weights load
    from safetensors where the model has them.

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


def _load(plan: ReplicaPlan, args: EngineArgs) -> LoadedPipeline:
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
    plan, dtypes = with_dtypes(plan, device)
    args = plan.stage.engine_args
    local = Path(args.model).is_dir()
    index = untyped_diffusers.DiffusionPipeline.load_config(args.model) if local else {}
    pipe = untyped_diffusers.DiffusionPipeline.from_pretrained(
        args.model,
        dtype={part: weight_dtype(args, device, part) for part in dtypes.types},
        variant=args.variant,
        revision=args.revision,
        local_files_only=local,
        **replaced_parts(index, args.model),
        **({"device_map": "balanced"} if spread else {}),
        **quantized_arguments(args, device),
    )
    pipe.set_progress_bar_config(disable=True)
    apply_settings(pipe, args.pipeline)
    if not spread:
        place(pipe, args.pipeline, torch.device("cuda:0" if device == "cuda" else "cpu"))
    _hold_autoencoder(pipe)
    return LoadedPipeline(pipe, plan, dtypes)


def _hold_autoencoder(pipe: Any) -> None:
    """Keep an autoencoder that has another type than the denoiser in it."""
    vae, denoiser = getattr(pipe, "vae", None), next(iter(denoisers(pipe).values()), None)
    if isinstance(vae, torch.nn.Module) and denoiser is not None and vae.dtype != denoiser.dtype:
        hold_dtype(vae)


def _device(args: EngineArgs) -> str:
    cuda = torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        reason = why_no_cuda(torch.__version__, torch.version.cuda)
        raise ModelLoadFailed(
            f"{args.model}: its device is cuda, which cannot be used: {reason}; or use device: cpu"
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
    text = f"{type(error).__name__} {error} {error.__cause__}".lower()
    fix = next((fix for sign, fix in _FIXES if sign in text), "the replica's log has more")
    return f"{model}: {cause}; {fix.format(diffusers=diffusers.__version__)}"
