"""LoRA files with random weights for the parts of a pipeline, small enough to make in a test."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def lora_weights(
    parts: dict[str, Any], seed: int, *, rank: int = 2, size: float = 0.5
) -> dict[str, Any]:
    """Make weights for the attention of each part, named as the pipeline names it."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for part, module in parts.items():
        for name, layer in module.named_modules():
            if name.endswith(("to_q", "to_v", "q_proj", "v_proj")):
                key = f"{part}.{name}"
                down = torch.randn(rank, layer.in_features, generator=generator)
                up = torch.randn(layer.out_features, rank, generator=generator)
                weights[f"{key}.lora_A.weight"] = down * size
                weights[f"{key}.lora_B.weight"] = up * size
    return weights


def save_lora_like(path: Path, part: str, own: dict[str, Any], seed: int) -> Path:
    """Write weights for the attention of a part whose own weights are `own`, not loaded as one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in own.items():
        if name.endswith(("to_q.weight", "to_v.weight")):
            key, (out_features, in_features) = name.removesuffix(".weight"), weight.shape
            down = torch.randn(2, in_features, generator=generator)
            up = torch.randn(out_features, 2, generator=generator)
            weights[f"{part}.{key}.lora_A.weight"] = 0.5 * down
            weights[f"{part}.{key}.lora_B.weight"] = 0.5 * up
    save_file(weights, path)
    return path


def save_lora(path: Path, parts: dict[str, Any], seed: int, **options: Any) -> Path:
    """Write such weights to a .safetensors file."""
    save_file(lora_weights(parts, seed, **options), path)
    return path


def save_peft(path: Path, parts: dict[str, Any], seed: int, **config: Any) -> Path:
    """Write such weights of one part to a folder, named and described as PEFT does."""
    path.mkdir()
    weights = lora_weights(parts, seed)
    own = {f"base_model.model.{name.partition('.')[2]}": each for name, each in weights.items()}
    save_file(own, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config}
    (path / "adapter_config.json").write_text(json.dumps(about))
    return path
