"""PixArt-alpha with random weights, small enough for a test."""

from typing import Any

from diffusers import DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel

from scripts.families.parts import t5, tokenizer, vae


def pixart() -> Any:
    """PixArt-alpha."""
    return PixArtAlphaPipeline(
        tokenizer=tokenizer(64),
        text_encoder=t5(),
        vae=vae(),
        transformer=PixArtTransformer2DModel(
            sample_size=32,  # the pipeline knows 32, 64, 128 and 256 only
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
        ),
        scheduler=DPMSolverMultistepScheduler(),
    )
