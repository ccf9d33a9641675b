"""Pipelines to measure with: the bundled one, and others built in code with random weights.

What they make is noise; what they cost is that of their kind.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers

from configs.settings import REPOSITORY

untyped_diffusers: Any = diffusers


BUNDLED = REPOSITORY / "models" / "tiny"


_TOKENIZER = BUNDLED / "tokenizer"


_TEXT_TOKENS = 8


@dataclass(frozen=True)
class BenchModel:
    """A pipeline and what is asked of it.

    Attributes:
        about: What it is, in words.
        build: Makes it, on the CPU; None loads the bundled one.
        size: Width and height, pixels.
        steps: Denoising steps.
        guidance: Guidance scale.
        cuda: Whether it is for CUDA devices only, in bfloat16.
    """

    about: str
    build: Callable[[], Any] | None
    size: int
    steps: int
    guidance: float = 3.0
    cuda: bool = False


class _ShortText(diffusers.StableDiffusion3Pipeline):  # type: ignore[misc]
    """Stable Diffusion 3 that reads few tokens, as a small model would."""

    def encode_prompt(self, *args: Any, **options: Any) -> Any:
        return super().encode_prompt(*args, **{**options, "max_sequence_length": _TEXT_TOKENS})


class _ShortFlux(diffusers.FluxPipeline):  # type: ignore[misc]
    """FLUX that reads few tokens, as a small model would."""

    def encode_prompt(self, *args: Any, **options: Any) -> Any:
        return super().encode_prompt(*args, **{**options, "max_sequence_length": _TEXT_TOKENS})


def _overhead_dit() -> Any:
    return _sd3(_ShortText, layers=12, heads=4, head_size=16, text=64, vae_blocks=2)


def _medium_dit() -> Any:
    return _sd3(_ShortText, layers=8, heads=8, head_size=64, text=64, vae_blocks=2)


def _real_sd3() -> Any:
    """The denoiser of Stable Diffusion 3 medium by its published configuration."""
    return _sd3(
        diffusers.StableDiffusion3Pipeline,
        layers=24,
        heads=24,
        head_size=64,
        text=4096,
        vae_blocks=4,
        channels=16,
        sample_size=128,
        pooled_projection_dim=2048,
        pos_embed_max_size=192,
        caption_projection_dim=1536,
    )


def _overhead_flux() -> Any:
    return _flux(
        _ShortFlux,
        channels=4,
        text=32,
        pooled=32,
        vae_blocks=2,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=16,
        num_attention_heads=4,
        axes_dims_rope=(4, 4, 8),
    )


def _part_of_flux() -> Any:
    """Blocks of FLUX.1 dev by its published configuration, about a quarter as many."""
    return _flux(
        diffusers.FluxPipeline,
        channels=16,
        text=4096,
        pooled=768,
        vae_blocks=4,
        num_layers=5,
        num_single_layers=10,
        attention_head_dim=128,
        num_attention_heads=24,
        axes_dims_rope=(16, 56, 56),
    )


def _flux(
    pipeline: Any, *, channels: int, text: int, pooled: int, vae_blocks: int, **options: Any
) -> Any:
    tokenizer = _tokenizer()
    return pipeline(
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * channels,
            joint_attention_dim=text,
            pooled_projection_dim=pooled,
            guidance_embeds=True,
            **options,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(channels, vae_blocks),
        text_encoder=_clip(pooled),
        tokenizer=tokenizer,
        text_encoder_2=_t5(text),
        tokenizer_2=tokenizer,
    )


def _sd3(
    pipeline: Any,
    *,
    layers: int,
    heads: int,
    head_size: int,
    text: int,
    vae_blocks: int,
    channels: int = 8,
    **options: Any,
) -> Any:
    width = heads * head_size
    pooled = options.get("pooled_projection_dim", 64)
    tokenizer = _tokenizer()
    transformer = diffusers.SD3Transformer2DModel(
        patch_size=2,
        in_channels=channels,
        out_channels=channels,
        num_layers=layers,
        attention_head_dim=head_size,
        num_attention_heads=heads,
        joint_attention_dim=text,
        **{
            "sample_size": 16,
            "caption_projection_dim": width,
            "pooled_projection_dim": pooled,
            **options,
        },
    )
    return pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(channels, vae_blocks),
        text_encoder=_clip(pooled // 2, projection=True),
        tokenizer=tokenizer,
        text_encoder_2=_clip(pooled // 2, projection=True),
        tokenizer_2=tokenizer,
        text_encoder_3=_t5(text),
        tokenizer_3=tokenizer,
    )


def _tokenizer() -> Any:
    return transformers.CLIPTokenizer.from_pretrained(_TOKENIZER, model_max_length=_TEXT_TOKENS)


def _words() -> int:
    return len(json.loads((_TOKENIZER / "vocab.json").read_text()))


def _clip(width: int, *, projection: bool = False) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=_words(),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=width,
        bos_token_id=_words() - 2,
        eos_token_id=_words() - 1,
        pad_token_id=_words() - 1,
    )
    kind = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return kind(config).eval()


def _t5(width: int) -> Any:
    config = transformers.T5Config(
        vocab_size=_words(), d_model=width, d_ff=width, d_kv=8, num_layers=2, num_heads=4
    )
    return transformers.T5EncoderModel(config).eval()


def _vae(channels: int, blocks: int) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(32,) * blocks,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        latent_channels=channels,
        norm_num_groups=8,
        shift_factor=0.06,
        scaling_factor=1.5,
    ).eval()


MODELS = {
    "tiny": BenchModel("the bundled model, a UNet of 2.3 M parameters", None, 64, 20),
    "dit": BenchModel(
        "a DiT like Stable Diffusion 3, 12 blocks, 24 tokens: mostly overhead",
        _overhead_dit,
        16,
        20,
    ),
    "flux": BenchModel(
        "a DiT like FLUX, 12 blocks, 24 tokens, no second call: mostly overhead",
        _overhead_flux,
        16,
        20,
    ),
    "medium": BenchModel(
        "a DiT like Stable Diffusion 3, 8 blocks, 40 M parameters: mostly arithmetic",
        _medium_dit,
        32,
        4,
    ),
    "sd3": BenchModel(
        "the denoiser of Stable Diffusion 3 medium, 2 G parameters, 1024 pixels",
        _real_sd3,
        1024,
        8,
        cuda=True,
    ),
    "flux_part": BenchModel(
        "15 of the 57 blocks of FLUX.1 dev, 3.2 G parameters, 1024 pixels",
        _part_of_flux,
        1024,
        8,
        cuda=True,
    ),
}


def make(model: BenchModel, device: str) -> Any:
    """Return the pipeline, ready on `device`: the same each time."""
    torch.manual_seed(0)
    if model.build is None:
        pipe = untyped_diffusers.DiffusionPipeline.from_pretrained(BUNDLED, dtype=torch.float32)
    else:
        with torch.device(device if model.cuda else "cpu"):
            pipe = model.build()
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device, torch.bfloat16 if model.cuda else torch.float32)
