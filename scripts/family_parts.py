"""Parts with random weights that the tiny pipelines of several families are made of."""

import json
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from workers.engine.image_text_processor import ImageTextProcessor

TOKENIZER = Path(__file__).parents[1] / "models" / "tiny" / "tokenizer"
WORDS = len(json.loads((TOKENIZER / "vocab.json").read_text()))


def tokenizer(length: int = 24) -> Any:
    """The bundled model's own tokenizer, cutting after `length` tokens."""
    return CLIPTokenizer.from_pretrained(TOKENIZER, model_max_length=length)


def clip(*, projection: bool = False) -> Any:
    """A CLIP text encoder, 32 wide."""
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


def t5(width: int = 32) -> Any:
    """A T5 text encoder."""
    config = T5Config(vocab_size=WORDS, d_model=width, d_ff=37, d_kv=8, num_layers=2, num_heads=4)
    return T5EncoderModel(config).eval()


def vae(channels: int = 4, **options: Any) -> Any:
    """An autoencoder of images: 8 x 8 pixels to a latent, as all real ones have it."""
    return AutoencoderKL(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=4,
        mid_block_add_attention=False,
        **options,
    )


def umt5() -> Any:
    """The text encoder of Wan, 32 wide."""
    config = UMT5Config(vocab_size=WORDS, d_model=32, d_ff=37, d_kv=8, num_layers=2, num_heads=4)
    return UMT5EncoderModel(config).eval()


def byte_tokenizer() -> Any:
    """A tokenizer of Qwen's class in which every byte is a token."""
    words = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    marks = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    made: Any = Qwen2Tokenizer(
        vocab=words, merges=[], additional_special_tokens=[f"<|{mark}|>" for mark in marks]
    )
    made.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    )
    return made


def qwen_vl() -> Any:
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


def qwen_processor() -> Any:
    """What shows the image to the text encoder of Qwen-Image-Edit, at few pixels."""
    images = Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    return ImageTextProcessor(images, byte_tokenizer())


def qwen3() -> Any:
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


def gemma() -> Any:
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


def qwen_vae() -> Any:
    """The autoencoder of Qwen-Image: 8 x 8 pixels to a latent of 16 channels."""
    return AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def wan_vae() -> Any:
    """The autoencoder of Wan: 8 x 8 pixels of 4 frames to a latent of 16 channels."""
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
