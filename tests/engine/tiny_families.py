"""Pipelines of several diffusers families with random weights, small enough to make in a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

TOKENIZER = Path(__file__).parents[2] / "models" / "tiny" / "tokenizer"
WORDS = len(json.loads((TOKENIZER / "vocab.json").read_text()))


def _tokenizer(length: int = 24) -> Any:
    return CLIPTokenizer.from_pretrained(TOKENIZER, model_max_length=length)


def _clip(*, projection: bool = False) -> Any:
    config = CLIPTextConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=32,
        bos_token_id=WORDS - 2,
        eos_token_id=WORDS - 1,
        pad_token_id=WORDS - 1,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def _t5() -> Any:
    config = T5Config(vocab_size=WORDS, d_model=32, d_ff=37, d_kv=8, num_layers=2, num_heads=4)
    return T5EncoderModel(config).eval()


def _vae(channels: int = 4, blocks: int = 2, **options: Any) -> Any:
    return AutoencoderKL(
        block_out_channels=(32,) * blocks,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        latent_channels=channels,
        norm_num_groups=8,
        **options,
    )


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
    return StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=_clip(),
        tokenizer=_tokenizer(),
        unet=_unet(cross_attention_dim=32),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    return StableDiffusionXLPipeline(
        vae=_vae(force_upcast=True),
        text_encoder=_clip(),
        text_encoder_2=_clip(projection=True),
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
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
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=8,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            out_channels=8,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(8, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=_clip(projection=True),
        tokenizer=_tokenizer(),
        text_encoder_2=_clip(projection=True),
        tokenizer_2=_tokenizer(),
        text_encoder_3=T5EncoderModel(
            T5Config(vocab_size=WORDS, d_model=64, d_ff=37, d_kv=8, num_layers=2, num_heads=4)
        ).eval(),
        tokenizer_3=_tokenizer(64),
    )


def flux() -> Any:
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
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
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(4, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=_clip(),
        tokenizer=_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=_tokenizer(64),
    )


def pixart() -> Any:
    return PixArtAlphaPipeline(
        tokenizer=_tokenizer(64),
        text_encoder=_t5(),
        vae=_vae(blocks=4),
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


FAMILIES: dict[str, Callable[[], Any]] = {
    builder.__name__: builder
    for builder in (stable_diffusion, stable_diffusion_xl, stable_diffusion_3, flux, pixart)
}


def save_family(name: str, folder: Path) -> Path:
    """Make the pipeline of that family with weights that are always the same, and save it."""
    torch.manual_seed(0)
    FAMILIES[name]().save_pretrained(folder)
    return folder
