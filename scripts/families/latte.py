"""Latte with random weights, small enough for a test."""

from typing import Any

from diffusers import DDIMScheduler, LattePipeline, LatteTransformer3DModel

from scripts.families.parts import t5, tokenizer, vae


def latte() -> Any:
    """Latte, of which no code of ours knows: `video_length`, and an autoencoder of images."""
    return LattePipeline(
        tokenizer=tokenizer(64),
        text_encoder=t5(),
        vae=vae(),
        transformer=LatteTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=1,
            cross_attention_dim=16,
            attention_bias=True,
            sample_size=8,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            caption_channels=32,
            video_length=16,
        ),
        scheduler=DDIMScheduler(clip_sample=False),
    )
