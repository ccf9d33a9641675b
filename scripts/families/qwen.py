"""Qwen-Image and Qwen-Image-Edit with random weights, small enough for a test."""

from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessor

from scripts.families.parts import byte_tokenizer
from workers.engine.image_text_processor import ImageTextProcessor


def qwen_image() -> Any:
    """Qwen-Image."""
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_qwen_vae(),
        text_encoder=_qwen_vl(),
        tokenizer=byte_tokenizer(),
        transformer=_qwen_transformer(),
    )


def qwen_image_edit() -> Any:
    """Qwen-Image-Edit, which scales its image to a million pixels."""
    return QwenImageEditPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_qwen_vae(),
        text_encoder=_qwen_vl(),
        tokenizer=byte_tokenizer(),
        processor=_qwen_processor(),
        transformer=_qwen_transformer(),
    )


def _qwen_transformer() -> Any:
    """The denoiser of Qwen-Image."""
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    )


def _qwen_vl() -> Any:
    """The text encoder of Qwen-Image, 32 wide, with its eyes."""
    words = byte_tokenizer()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
        image_token_id=words.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=words.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=words.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=words.convert_tokens_to_ids("<|vision_end|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _qwen_processor() -> Any:
    """What shows the image to the text encoder of Qwen-Image-Edit, at few pixels."""
    images = Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    return ImageTextProcessor(images, byte_tokenizer())


def _qwen_vae() -> Any:
    """The autoencoder of Qwen-Image: 8 x 8 pixels to a latent of 16 channels."""
    return AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
