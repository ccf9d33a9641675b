"""A model's weights as they are loaded: their types, those kept small, and those of a rank.

Quantized parts are read with the arguments that diffusers has for it. Which parts a pipeline has is
read from its index, before any weight is. The packages that quantize are optional; one that is
missing is named with the way to install it.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.quantizers import PipelineQuantizationConfig

from configs.errors import ModelLoadFailed
from configs.stage_config import EngineArgs, Quantization
from workers.failures import short_cause

# The parts of a pipeline that are called at each step.
DENOISERS = ("unet", "transformer", "transformer_2")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_PACKAGES = {
    "int8": "torchao",
    "fp8": "torchao",
    "bitsandbytes_8bit": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "gguf": "gguf",
}


def weight_dtype(args: EngineArgs, device: str, part: str = "default") -> torch.dtype:
    """Return the type in which a part is loaded onto a kind of device, `cpu` or `cuda`."""
    if isinstance(args.dtype, str):
        said: str = args.dtype
    else:
        said = args.dtype.get(part, args.dtype.get("default", "auto"))
    if said == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return DTYPES[said]


def load_denoisers(
    args: EngineArgs, described: Mapping[str, tuple[str, torch.dtype]], device: torch.device
) -> dict[str, Any]:
    """Return those parts of the pipeline, by their names, in evaluation mode.

    `described` has the class of diffusers of each and its dtype. A GPU gets them straight.

    Raises:
        ModelLoadFailed: They cannot be quantized as the stage asks for; so do the errors of
            diffusers for weights that cannot be read.
    """
    untyped: Any = diffusers
    given = quantized_arguments(args, device.type)
    config = given.get("quantization_config")
    configs = {} if config is None else config.quant_mapping
    found: dict[str, Any] = {}
    for name, (class_name, dtype) in described.items():
        if name in given:  # read from a file of its own
            found[name] = given[name].eval()
            continue
        found[name] = getattr(untyped, class_name).from_pretrained(
            args.model,
            subfolder=name,
            dtype=dtype,
            variant=args.variant,
            revision=args.revision,
            local_files_only=Path(args.model).is_dir(),
            quantization_config=configs.get(name),
            device_map=None if device.type == "cpu" else device,
        )
        found[name].eval()
    return found


def quantized_arguments(args: EngineArgs, device: str) -> dict[str, Any]:
    """Return what to give to `from_pretrained` beside the rest; nothing where all stays as it is.

    Raises:
        ModelLoadFailed: A package is missing, or the model, device or file does not fit.
    """
    wanted = args.pipeline.quantization
    if wanted is None:
        return {}
    package = _PACKAGES[wanted.method]
    if find_spec(package) is None:
        raise _refusal(wanted, f"it needs the package {package}: pip install {package}")
    if package == "bitsandbytes" and device == "cpu":
        raise _refusal(wanted, "it needs a CUDA device; use int8 on a CPU")
    parts = _parts(args, wanted)
    try:
        if wanted.method == "gguf":
            return _from_gguf(args, wanted, parts, device)
        mapping = {
            name: _config(wanted.method, library, weight_dtype(args, device, name))
            for name, library in parts.items()
        }
        return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping)}
    except ModelLoadFailed:
        raise
    except Exception as error:
        raise _refusal(wanted, short_cause(error)) from error


def _parts(args: EngineArgs, wanted: Quantization) -> dict[str, str]:
    """The parts to quantize, each with the library of its class."""
    untyped: Any = diffusers.DiffusionPipeline
    index: Mapping[str, Any] = untyped.load_config(args.model, revision=args.revision)
    libraries = {
        name: entry[0]
        for name, entry in index.items()
        if isinstance(entry, list) and entry[0] in {"diffusers", "transformers"}
    }
    names = wanted.components or tuple(name for name in DENOISERS if name in libraries)
    for name in names:
        if name not in libraries:
            known = ", ".join(sorted(libraries))
            raise _refusal(wanted, f"the model has no part {name}; its parts are {known}")
    return {name: libraries[name] for name in names}


def _config(method: str, library: str, dtype: torch.dtype) -> Any:
    module: Any = diffusers if library == "diffusers" else transformers
    if method == "bitsandbytes_8bit":
        return module.BitsAndBytesConfig(load_in_8bit=True)
    if method == "bitsandbytes_4bit":
        return module.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    # Here, since the package is optional and takes seconds.
    torchao: Any = import_module("torchao.quantization")
    kind = torchao.Int8WeightOnlyConfig if method == "int8" else torchao.Float8WeightOnlyConfig
    return module.TorchAoConfig(kind())


def _from_gguf(
    args: EngineArgs, wanted: Quantization, parts: Mapping[str, str], device: str
) -> dict[str, Any]:
    untyped: Any = diffusers
    if len(parts) != 1:
        raise _refusal(wanted, f"one file is one part; name it in components: {', '.join(parts)}")
    (name,) = parts
    dtype = weight_dtype(args, device, name)
    index: Mapping[str, Any] = untyped.DiffusionPipeline.load_config(
        args.model, revision=args.revision
    )
    kind: Any = getattr(untyped, index[name][1], None)
    if not hasattr(kind, "from_single_file"):
        raise _refusal(wanted, f"{index[name][1]} cannot be read from one file")
    return {
        name: kind.from_single_file(
            wanted.gguf_file,
            quantization_config=untyped.GGUFQuantizationConfig(compute_dtype=dtype),
            config=args.model,
            subfolder=name,
            dtype=dtype,
        )
    }


def _refusal(wanted: Quantization, reason: str) -> ModelLoadFailed:
    return ModelLoadFailed(f"engine_args.quantization: {wanted.method} cannot be used: {reason}")
