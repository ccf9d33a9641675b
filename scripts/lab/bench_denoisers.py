"""Denoisers to measure with, built in code with random weights, and what they are called with.

Those of size `real` have the published configurations of their models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel

Call = dict[str, Any]


@dataclass(frozen=True)
class BenchDenoiser:
    """A denoiser and its calls.

    Attributes:
        about: What it is, in words.
        part: Its name in a pipeline.
        build: Makes it, on the default device, in the default type.
        call: Returns the arguments of a call of so many rows, on the CPU, in float32.
    """

    about: str
    part: str
    build: Callable[[], Any]
    call: Callable[[int], Call]

    def make(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return it on the device, with weights of that type: the same each time."""
        torch.manual_seed(0)
        usual = torch.get_default_dtype()
        # Made where it goes: in float32 on the host a large one would take four times the memory.
        torch.set_default_dtype(dtype)
        try:
            with device:
                return self.build().eval()
        finally:
            torch.set_default_dtype(usual)

    def arguments(self, rows: int, device: torch.device, dtype: torch.dtype) -> Call:
        """Return the arguments of a call on the device, in the type of the weights."""
        return {name: _placed(value, device, dtype) for name, value in self.call(rows).items()}


def _placed(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: _placed(item, device, dtype) for name, item in value.items()}
    if torch.is_tensor(value):
        return value.to(device, dtype if value.is_floating_point() else None)
    return value


def _unet(channels: tuple[int, ...], latent: int, words: int) -> BenchDenoiser:
    levels = len(channels)

    def build() -> Any:
        return UNet2DConditionModel(
            block_out_channels=channels,
            layers_per_block=2,
            sample_size=latent,
            down_block_types=("DownBlock2D", *("CrossAttnDownBlock2D",) * (levels - 1)),
            up_block_types=(*("CrossAttnUpBlock2D",) * (levels - 1), "UpBlock2D"),
            cross_attention_dim=256,
            attention_head_dim=8,
        )

    def call(rows: int) -> Call:
        return {
            "sample": torch.randn(rows, 4, latent, latent),
            "timestep": torch.tensor(500),
            "encoder_hidden_states": torch.randn(rows, words, 256),
            "return_dict": False,
        }

    return BenchDenoiser("a UNet like Stable Diffusion's", "unet", build, call)


def _sdxl() -> BenchDenoiser:
    def build() -> Any:
        return UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=2,
            transformer_layers_per_block=[1, 2, 10],
            attention_head_dim=[5, 10, 20],
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )

    def call(rows: int) -> Call:
        return {
            "sample": torch.randn(rows, 4, 128, 128),
            "timestep": torch.tensor(500),
            "encoder_hidden_states": torch.randn(rows, 77, 2048),
            "added_cond_kwargs": {
                "text_embeds": torch.randn(rows, 1280),
                "time_ids": torch.tensor([[1024.0, 1024, 0, 0, 1024, 1024]]).repeat(rows, 1),
            },
            "return_dict": False,
        }

    about = "the UNet of Stable Diffusion XL, 2.6 G parameters, 1024 pixels"
    return BenchDenoiser(about, "unet", build, call)


def _flux(
    about: str, tokens: int, words: int, text: int, pooled: int, **size: Any
) -> BenchDenoiser:
    guided = size.get("guidance_embeds", False)

    def build() -> Any:
        return FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            joint_attention_dim=text,
            pooled_projection_dim=pooled,
            **size,
        )

    def call(rows: int) -> Call:
        return {
            "hidden_states": torch.randn(rows, tokens, 64),
            "encoder_hidden_states": torch.randn(rows, words, text),
            "pooled_projections": torch.randn(rows, pooled),
            "timestep": torch.full((rows,), 0.5),
            "img_ids": torch.zeros(tokens, 3),
            "txt_ids": torch.zeros(words, 3),
            "guidance": torch.full((rows,), 3.5) if guided else None,
            "return_dict": False,
        }

    return BenchDenoiser(about, "transformer", build, call)


def _dit(heads: int, layers: int, tokens: int, words: int) -> BenchDenoiser:
    return _flux(
        "a DiT like FLUX",
        tokens,
        words,
        512,
        256,
        num_layers=layers // 3,
        num_single_layers=layers - layers // 3,
        attention_head_dim=64,
        num_attention_heads=heads,
        axes_dims_rope=(16, 24, 24),
    )


def _wan(about: str, heads: int, feed_forward: int, layers: int) -> BenchDenoiser:
    def build() -> Any:
        return WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=128,
            in_channels=16,
            out_channels=16,
            text_dim=4096,
            freq_dim=256,
            ffn_dim=feed_forward,
            num_layers=layers,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=1024,
        )

    def call(rows: int) -> Call:
        return {
            "hidden_states": torch.randn(rows, 16, 21, 60, 104),
            "timestep": torch.full((rows,), 500),
            "encoder_hidden_states": torch.randn(rows, 512, 4096),
            "return_dict": False,
        }

    return BenchDenoiser(about, "transformer", build, call)


DENOISERS = {
    "tiny": {"UNet": _unet((32, 64), 16, 16), "DiT": _dit(4, 2, 64, 16)},
    "small": {"UNet": _unet((64, 128), 32, 64), "DiT": _dit(8, 6, 256, 64)},
    "real": {
        "SDXL": _sdxl(),
        "FLUX.1": _flux(
            "the transformer of FLUX.1 dev, 11.9 G parameters, 1024 pixels",
            4096,
            512,
            4096,
            768,
            num_layers=19,
            num_single_layers=38,
            attention_head_dim=128,
            num_attention_heads=24,
            guidance_embeds=True,
            axes_dims_rope=(16, 56, 56),
        ),
        "Wan-1.3B": _wan(
            "the transformer of Wan 2.1, 1.4 G parameters, 832x480, 81 frames", 12, 8960, 30
        ),
        "Wan-14B": _wan(
            "the transformer of Wan 2.1, 14.3 G parameters, 832x480, 81 frames", 40, 13824, 40
        ),
    },
}
