"""In which types the parts of a model are loaded: the stage's, what is known, what the files say.

A word in the stage holds for all parts. What it leaves to the engine (`auto`) is on a GPU, the
first that applies: the type known for that part of the model (configs/known_models.yaml); float32
for an autoencoder that needs it; the type of the denoiser, as it is saved where that is half
precision, else bfloat16. GPUs before compute capability 8.0 (T4, V100, RTX 20) only emulate
bfloat16, and have float16 in its place. On a CPU all is float32.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils import BaseOutput

from configs.errors import ModelLoadFailed
from configs.fields import choices
from configs.known_models import SavedAs, find_known_model
from configs.stage_config import Dtype, EngineArgs, ReplicaPlan
from workers.devices.weights import DENOISERS
from workers.engine.known_settings import names_of
from workers.engine.loading.saved_parts import SavedPart, read_config, read_index
from workers.families import FLOAT32_AUTOENCODERS
from workers.patches import put

logger = logging.getLogger(__name__)

STAGE: Final = "stage"
RULE: Final = "rule"
_DEFAULT: Final = "default"
_SAVED: Final[Mapping[str, Dtype]] = {"F16": "float16", "BF16": "bfloat16"}
# NVIDIA's tensor cores know bfloat16 from Ampere on.
_BFLOAT16_FROM: Final = (8, 0)


@dataclass(frozen=True)
class Dtypes:
    """The types of a model's parts.

    Attributes:
        types: By the names of the parts; `default` is that of the others. None is `auto`.
        sources: Of each of them: `stage`, `rule`, or the address of the page that says so.
    """

    types: Mapping[str, Dtype]
    sources: Mapping[str, str]


def with_dtypes(
    plan: ReplicaPlan, parts: Mapping[str, SavedPart], device: str
) -> tuple[ReplicaPlan, Dtypes]:
    """Return the plan with the type of each part in place of `auto`, and where they are from.

    `parts` are those of the model's folder; `device` is `cpu` or `cuda`.

    Raises:
        ModelLoadFailed: The stage names a part that the model does not have.
    """
    args = plan.stage.engine_args
    chosen = choose_dtypes(args, parts, device)
    shown = ", ".join(
        f"{part} {dtype} ({chosen.sources[part]})" for part, dtype in chosen.types.items()
    )
    logger.info("types of the weights of %s: %s", args.model, shown)
    stage = replace(plan.stage, engine_args=replace(args, dtype=chosen.types))
    return replace(plan, stage=stage), chosen


def choose_dtypes(args: EngineArgs, parts: Mapping[str, SavedPart], device: str) -> Dtypes:
    """Return the types of the parts on `cpu` or `cuda`."""
    staged: Mapping[str, Dtype]
    staged = {_DEFAULT: args.dtype} if isinstance(args.dtype, str) else args.dtype
    folder = Path(args.model)
    _refuse_strangers(args.model, staged, parts)
    said = {part: dtype for part, dtype in staged.items() if dtype != "auto"}
    automatic, sources = _on_gpu(args, folder, parts, said) if device == "cuda" else _on_cpu(parts)
    # A part that is not named has the stage's default, unless it is named `auto`.
    left = {part for part in automatic if staged.get(part, staged.get(_DEFAULT, "auto")) == "auto"}
    types = {part: dtype for part, dtype in automatic.items() if part in left} | said
    return Dtypes(types, {part: sources[part] if part in left else STAGE for part in types})


def _refuse_strangers(
    model: str, staged: Mapping[str, Dtype], parts: Mapping[str, SavedPart]
) -> None:
    for name in staged:
        if parts and name != _DEFAULT and name not in parts:
            known = choices([_DEFAULT, *sorted(parts)])
            raise ModelLoadFailed(
                f"{model}: engine_args.dtype.{name}: the model has no such part; use {known}"
            )


def _on_cpu(parts: Mapping[str, SavedPart]) -> tuple[dict[str, Dtype], dict[str, str]]:
    names = [_DEFAULT, *parts]
    return dict.fromkeys(names, "float32"), dict.fromkeys(names, RULE)


def _on_gpu(
    args: EngineArgs,
    folder: Path,
    parts: Mapping[str, SavedPart],
    said: Mapping[str, Dtype],
) -> tuple[dict[str, Dtype], dict[str, str]]:
    known, source = _known(args.model, folder)
    denoisers = [name for name in DENOISERS if name in parts]
    types: dict[str, Dtype] = {}
    for name in parts:
        if name in known:
            types[name] = known[name]
        elif name == "vae" and needs_float32(parts[name], read_index(folder)):
            types[name] = "float32"
    usual = next(
        (dtype for name in DENOISERS if (dtype := said.get(name) or types.get(name))), None
    )
    if usual is None:
        usual = _half(next((parts[name].main_type for name in denoisers), None))
    for name in denoisers:
        types.setdefault(name, usual)
    sources = {name: source if name in known else RULE for name in types}
    return {_DEFAULT: usual, **types}, {_DEFAULT: RULE, **sources}


def _known(model: str, folder: Path) -> tuple[Mapping[str, Dtype], str]:
    index = read_index(folder)
    denoiser = next((name for name in DENOISERS if name in index), "")
    scheduler = read_config(folder, "scheduler")
    saved = SavedAs(
        str(index.get("_class_name", "")), index, read_config(folder, denoiser), scheduler
    )
    found = find_known_model(names_of(model), saved)
    figures = () if found is None else found[0].figures
    figure = next((each for each in figures if each.name == "dtype"), None)
    return ({}, "") if figure is None else (figure.value, figure.source)


def part_dtypes(pipe: Any) -> dict[str, str]:
    """Return the type that most weights of each part of a loaded pipeline have."""
    found = {}
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            numbers = Counter[torch.dtype]()
            for weight in part.parameters():
                numbers[weight.dtype] += weight.numel()
            if numbers:
                found[name] = str(numbers.most_common(1)[0][0]).removeprefix("torch.")
    return found


def needs_float32(vae: SavedPart, index: Mapping[str, Any]) -> bool:
    """Tell whether an autoencoder is run in float32 by its makers.

    Those of some classes are (workers/families.py), and those that the pipeline itself would bring
    to float32 for each picture: `force_upcast` in the configuration of Stable Diffusion XL.
    """
    if vae.kind in FLOAT32_AUTOENCODERS:
        return True
    pipeline = getattr(diffusers, str(index.get("_class_name")), None)
    return hasattr(pipeline, "upcast_vae") and bool(vae.config.get("force_upcast", True))


def _half(saved: str | None) -> Dtype:
    """The type of half precision of a denoiser that is saved in that one."""
    if emulates_bfloat16():
        return "float16"
    return _SAVED.get(saved or "", "bfloat16")


def emulates_bfloat16() -> bool:
    """Tell whether a device of this process computes bfloat16 in software only."""
    return any(
        torch.cuda.get_device_capability(device) < _BFLOAT16_FROM
        for device in range(torch.cuda.device_count())
    )


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
