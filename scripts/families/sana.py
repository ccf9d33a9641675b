"""Sana with random weights, small enough for a test."""

from typing import Any

from diffusers import (
    AutoencoderDC,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from transformers import Gemma2Config, Gemma2Model

from scripts.families.parts import WORDS, tokenizer


def sana() -> Any:
    """Sana."""
    return SanaPipeline(
        tokenizer=tokenizer(64),
        text_encoder=_gemma(),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_out_channels=(8,) * 6,
            decoder_block_out_channels=(8,) * 6,
            encoder_qkv_multiscales=((), (), (), (), (), (5,)),
            decoder_qkv_multiscales=((), (), (), (), (), (5,)),
            encoder_layers_per_block=(1,) * 6,
            decoder_layers_per_block=(1,) * 6,
            downsample_block_type="conv",
            upsample_block_type="interpolate",
        ),
        transformer=SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=8,
            sample_size=16,  # trained at 512 x 512, says this to the pipeline
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def _gemma() -> Any:
    """The text encoder of Sana, 8 wide."""
    config = Gemma2Config(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=WORDS - 1,
        bos_token_id=WORDS - 2,
        eos_token_id=WORDS - 1,
    )
    return Gemma2Model(config).eval()
