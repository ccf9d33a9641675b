"""Stable Diffusion 1.5, XL and 3 with random weights, small enough for a test."""

from typing import Any

from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

from scripts.families.parts import clip, t5, tokenizer, vae


def _unet(**options: Any) -> Any:
    return UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
        **options,
    )


def stable_diffusion() -> Any:
    """Stable Diffusion 1.5."""
    return StableDiffusionPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        unet=_unet(cross_attention_dim=32),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    """Stable Diffusion XL."""
    return StableDiffusionXLPipeline(
        vae=vae(force_upcast=True),
        text_encoder=clip(),
        text_encoder_2=clip(projection=True),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        unet=_unet(
            cross_attention_dim=64,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=80,
        ),
        scheduler=EulerDiscreteScheduler(steps_offset=1),
        add_watermarker=False,
    )


def stable_diffusion_3() -> Any:
    """Stable Diffusion 3."""
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=16,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            out_channels=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(16, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=clip(projection=True),
        tokenizer=tokenizer(),
        text_encoder_2=clip(projection=True),
        tokenizer_2=tokenizer(),
        text_encoder_3=t5(64),
        tokenizer_3=tokenizer(64),
    )
