"""Video families of diffusers with random weights, small enough for a test."""

from typing import Any

from diffusers import (
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    LattePipeline,
    LatteTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from scripts.lab.family_parts import WORDS, t5, tokenizer, vae


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


def ltx() -> Any:
    """LTX-Video."""
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=t5(),
        tokenizer=tokenizer(64),
        transformer=LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=1,
            caption_channels=32,
        ),
    )


def wan() -> Any:
    """Wan 2.2 text to video, with its two denoisers."""
    return WanPipeline(
        **_wan_parts(),
        transformer=_wan_transformer(16),
        transformer_2=_wan_transformer(16),
        boundary_ratio=0.875,
    )


def wan_image_to_video() -> Any:
    """Wan 2.2 image to video; the image comes as further channels of the sample."""
    return WanImageToVideoPipeline(
        **_wan_parts(),
        transformer=_wan_transformer(36),
        transformer_2=_wan_transformer(36),
        image_processor=None,
        image_encoder=None,
        boundary_ratio=0.9,
    )


def _wan_parts() -> dict[str, Any]:
    return {
        "tokenizer": tokenizer(64),
        "text_encoder": _umt5(),
        "vae": _wan_vae(),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    }


def _wan_transformer(channels: int) -> Any:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def _umt5() -> Any:
    """The text encoder of Wan, 32 wide."""
    config = UMT5Config(vocab_size=WORDS, d_model=32, d_ff=37, d_kv=8, num_layers=2, num_heads=4)
    return UMT5EncoderModel(config).eval()


def _wan_vae() -> Any:
    """The autoencoder of Wan: 8 x 8 pixels of 4 frames to a latent of 16 channels."""
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
