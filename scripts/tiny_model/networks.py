"""The tiny model's text encoder, denoiser and noise schedule, untrained.

Knows their sizes and the reasons for them. Knows nothing of pictures or training.
"""

from __future__ import annotations

from typing import Any

from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from scripts.tiny_model.tokenizer import MAX_TOKENS


def build_text_encoder(tokenizer: Any) -> Any:
    """A two-layer CLIP text model for the tokenizer."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        projection_dim=64,
        hidden_act="quick_gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModel(config)
    for name, weight in encoder.named_parameters():
        if "embedding" in name:  # CLIP's own start (0.02) is too weak for so few steps
            nn.init.normal_(weight, std=0.2)
    return encoder


def build_denoiser() -> Any:
    """The UNet: two levels (8x8 and 4x4), both with cross-attention."""
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=8,
        out_channels=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(64, 88),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=4,  # one channel per group would lose the colours
    )


def build_scheduler() -> Any:
    """Linear betas to 0.02 end in pure noise, so that flat backgrounds come out right."""
    return DDIMScheduler(
        beta_schedule="linear",
        beta_start=1e-4,
        beta_end=0.02,
        prediction_type="v_prediction",
        clip_sample=False,
        timestep_spacing="trailing",
        set_alpha_to_one=True,
        steps_offset=1,
    )
