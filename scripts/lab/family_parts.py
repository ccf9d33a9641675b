"""Parts with random weights that the tiny pipelines of several families are made of."""

import json
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

TOKENIZER = Path(__file__).parents[2] / "models" / "tiny" / "tokenizer"
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
