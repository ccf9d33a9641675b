"""Z-Image with random weights, small enough for a test."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from scripts.families.parts import byte_tokenizer, vae


def z_image() -> Any:
    """Z-Image."""
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(16, shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=_qwen3(),
        tokenizer=byte_tokenizer(),
        transformer=z_image_transformer(),
    )


def z_image_transformer() -> Any:
    """The denoiser of Z-Image."""
    return ZImageTransformer2DModel(
        in_channels=16,
        dim=48,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[2048, 64, 64],
    )


def _qwen3() -> Any:
    """The text encoder of Z-Image, 16 wide."""
    config = Qwen3Config(
        vocab_size=len(byte_tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    return Qwen3Model(config).eval()
