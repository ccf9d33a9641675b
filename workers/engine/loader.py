"""Loads the diffusers pipeline of a replica onto its devices, with the settings of its stage."""

import importlib.util
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from configs.errors import ModelLoadFailed
from configs.machine import why_no_cuda
from configs.stage_config import EngineArgs, ReplicaPlan
from workers.devices.chunk import begin_ranks, denoisers
from workers.devices.rank_start import LoadingRanks
from workers.devices.weights import DENOISERS, quantized_arguments, weight_dtype
from workers.engine.loading.download import Tell, fetch, untold
from workers.engine.loading.dtypes import Dtypes, hold_dtype, with_dtypes
from workers.engine.loading.failures import explain
from workers.engine.loading.folder import left_out, with_variant
from workers.engine.loading.memory import check_memory, estimate, free_host, free_memory
from workers.engine.loading.saved_parts import read_config, read_index, read_parts
from workers.engine.loading.settings import apply_settings, device_map_of, place
from workers.engine.loading.turns import turn_to_load
from workers.patches import ImageTextProcessor

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


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline on its devices.

    Attributes:
        pipe: The pipeline.
        plan: As it was loaded: with the model's folder in place of a hub id, and the type of each
            part in place of `auto`.
        dtypes: These types, and where they are from.
        ranks: The other ranks, which have loaded too; None where there are none.
    """

    pipe: Any
    plan: ReplicaPlan
    dtypes: Dtypes
    ranks: LoadingRanks | None = None


def load_pipeline(plan: ReplicaPlan) -> Any:
    """Return the pipeline alone that :meth:`load` loads, without further ranks."""
    return load(plan, with_ranks=False).pipe


def load(plan: ReplicaPlan, tell: Tell = untold, *, with_ranks: bool = True) -> LoadedPipeline:
    """Load the pipeline of `plan`, ready on its devices, in evaluation mode.

    A model of the hub is downloaded first, and `tell` learns how far that is.

    On CUDA the replica sees only its own chunk, as devices 0 to world_size - 1. The first holds the
    whole pipeline (``workers.devices.chunk`` gives the others work), unless the parts are
    spread by diffusers' `device_map="balanced"` (text encoders, denoiser and autoencoder on
    different devices, which adds memory and not speed). Further ranks load at the same time, and
    are the caller's to close. On CPU the chunk's cores become as many threads. What `dtype: auto`
    is for each part: ``workers.engine.loading.dtypes``. Weights load from safetensors where the
    model has them.

    Raises:
        ModelLoadFailed: Whatever went wrong, in one line with a fix.
    """
    model = plan.stage.engine_args.model
    try:
        return _load(plan, tell, with_ranks)
    except Exception as error:
        failure = explain(model, error)
        logger.warning("loading %s failed", model, exc_info=not failure.lasting)
    # Raised out here, so that no traceback keeps half a model in memory.
    raise failure


def _load(plan: ReplicaPlan, tell: Tell, with_ranks: bool) -> LoadedPipeline:
    untyped_diffusers: Any = diffusers
    untyped_transformers: Any = transformers
    untyped_diffusers.utils.logging.disable_progress_bar()
    untyped_transformers.utils.logging.disable_progress_bar()
    args = plan.stage.engine_args
    device = _device(args)
    if args.parallel_config.device_map is not None and device == "cpu":
        raise ModelLoadFailed(
            f"{args.model}: parallel_config.device_map: balanced spreads parts over CUDA devices,"
            " and these are CPU cores; leave it out"
        )
    if args.model_path is None:
        plan = _with_model(plan, fetch(args, tell))
    tell("loading")
    if device == "cpu":
        torch.set_num_threads(len(plan.devices))
    plan = with_variant(plan)
    parts = read_parts(Path(plan.stage.engine_args.model), plan.stage.engine_args.variant)
    plan, dtypes = with_dtypes(plan, parts, device)
    args = plan.stage.engine_args
    need = estimate(args, parts, device)
    with _turn(need.host_own, tell):
        check_memory(args, parts, need, *free_memory(device))
        ranks = _begin_ranks(plan, device) if with_ranks else None
        try:
            pipe = _read(args, dtypes, device)
            if ranks is not None:
                ranks.await_loaded()
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
    return LoadedPipeline(pipe, plan, dtypes, ranks)


def _begin_ranks(plan: ReplicaPlan, device: str) -> LoadingRanks | None:
    folder = Path(plan.stage.engine_args.model)
    index = read_index(folder)
    kinds = {
        name: index[name][1] for name in DENOISERS if (index.get(name) or (None,))[0] is not None
    }

    def make(name: str) -> Any:
        with torch.device("meta"):
            return getattr(diffusers, kinds[name]).from_config(read_config(folder, name))

    return begin_ranks(plan, kinds, device, make)


def _turn(needed: int, tell: Tell) -> AbstractContextManager[None]:
    """Wait for memory that replicas of this host take as they load; none is waited for without."""
    if not needed:
        return nullcontext()

    def waiting() -> None:
        tell("waiting for memory until another replica has loaded")

    return turn_to_load(needed, free_host, waiting, loading=lambda: tell("loading"))


def _read(args: EngineArgs, dtypes: Dtypes, device: str) -> Any:
    untyped_diffusers: Any = diffusers
    index = untyped_diffusers.DiffusionPipeline.load_config(args.model)
    given = replaced_parts(index, args.model) | quantized_arguments(args, device)
    pipe = untyped_diffusers.DiffusionPipeline.from_pretrained(
        args.model,
        dtype={part: weight_dtype(args, device, part) for part in dtypes.types},
        variant=args.variant,
        local_files_only=True,
        device_map=device_map_of(args, device),
        **given,
        **left_out(args, given),
    )
    pipe.set_progress_bar_config(disable=True)
    apply_settings(pipe, args.pipeline)
    if args.parallel_config.device_map is None:
        place(pipe, args.pipeline, torch.device("cuda:0" if device == "cuda" else "cpu"))
    _hold_autoencoder(pipe)
    return pipe


def _with_model(plan: ReplicaPlan, folder: Path) -> ReplicaPlan:
    args = replace(plan.stage.engine_args, model=str(folder), revision=None)
    return replace(plan, stage=replace(plan.stage, engine_args=args))


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
