"""The types of a model's weights, by the words of a stage file. Knows no model."""

import torch

from configs.stage_config import EngineArgs

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def weight_dtype(args: EngineArgs, device: str) -> torch.dtype:
    """Return the type in which weights are loaded onto a kind of device, `cpu` or `cuda`."""
    if args.dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return DTYPES[args.dtype]
