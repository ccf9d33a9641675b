"""FLUX.1 and FLUX.1 Kontext with random weights, small enough for a test."""

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)

from scripts.families.parts import clip, t5, tokenizer, vae


def flux() -> Any:
    """FLUX.1."""
    return FluxPipeline(transformer=_flux_transformer(), **_flux_parts())


def flux_kontext() -> Any:
    """FLUX.1 Kontext, which scales its images to a million pixels."""
    return FluxKontextPipeline(transformer=_flux_transformer(), **_flux_parts())


def _flux_transformer() -> Any:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )


def _flux_parts() -> dict[str, Any]:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "vae": vae(shift_factor=0.06, scaling_factor=1.5),
        "text_encoder": clip(),
        "tokenizer": tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": tokenizer(64),
    }
