"""The stage files that come with the service, each on the tiny parts of its model's family."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from configs.settings import REPOSITORY
from configs.stages import load_stages
from scripts.lab.families import FAMILIES
from workers.devices.chunk import choose, denoisers
from workers.engine.loading.settings import (
    apply_settings,
    finish_settings,
    may_pin,
    offload_layers,
    offload_parts,
)

CPU = torch.device("cpu")
FILES = sorted((REPOSITORY / "configs").glob("*gb/*.yaml"))


def without_weights(kind: Any, transformer: Any, vae: Any) -> Any:
    """A pipeline of that kind with a denoiser and an autoencoder alone."""
    needed = {
        name: None
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.default is inspect.Parameter.empty and name != "self"
    }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    parts = {"transformer": transformer, "vae": vae, "scheduler": scheduler}
    if "guider" in needed:
        parts["guider"] = diffusers.ClassifierFreeGuidance()
    return kind(**{**needed, **parts})


def flux2(kind: Any) -> Any:
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(8,),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    return without_weights(kind, transformer, vae)


def hunyuan_video() -> Any:
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=16,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    return without_weights(diffusers.HunyuanVideo15Pipeline, transformer, vae)


def ltx2() -> Any:
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=1,
    )
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
    )
    return without_weights(diffusers.LTX2Pipeline, transformer, vae)


FAMILY: dict[str, Callable[[], Any]] = {
    "stabilityai/stable-diffusion-xl": FAMILIES["stable_diffusion_xl"],
    "stabilityai/stable-diffusion-3.5": FAMILIES["stable_diffusion_3"],
    "black-forest-labs/FLUX.1": FAMILIES["flux"],
    "black-forest-labs/FLUX.2-dev": lambda: flux2(diffusers.Flux2Pipeline),
    "black-forest-labs/FLUX.2-klein": lambda: flux2(diffusers.Flux2KleinPipeline),
    "Tongyi-MAI/Z-Image": FAMILIES["z_image"],
    "Qwen/Qwen-Image-Edit": FAMILIES["qwen_image_edit"],
    "Qwen/Qwen-Image": FAMILIES["qwen_image"],
    "Wan-AI/Wan2.2-T": FAMILIES["wan"],
    "Wan-AI/Wan2.2-I2V": FAMILIES["wan_image_to_video"],
    "hunyuanvideo-community/HunyuanVideo-1.5": hunyuan_video,
    "Lightricks/LTX-2": ltx2,
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_family_accepts_what_a_shipped_stage_asks_of_it(file: Path) -> None:
    (stage,) = load_stages(file)
    args = stage.engine_args
    pipe = next(made for name, made in FAMILY.items() if args.model.startswith(name))()
    apply_settings(pipe, args.pipeline)
    if args.pipeline.vae_use_tiling:
        assert pipe.vae.use_tiling
    if args.pipeline.enable_cpu_offload:
        offload_parts(pipe, CPU)
        parts = filter(None, pipe.components.values())
        assert any(not inspect.ismethod(getattr(part, "forward", None)) for part in parts)
    if args.pipeline.enable_layerwise_offload:
        offload_layers(pipe, CPU)
        for denoiser in denoisers(pipe).values():
            assert any(hasattr(part, "_diffusers_hook") for part in denoiser.modules())
    if args.parallel_config.way == "context":
        (denoiser,) = denoisers(pipe).values()
        published = inspect.signature(type(denoiser).__init__).parameters["num_attention_heads"]
        assert published.default % args.parallel_config.ulysses_degree == 0
        # The tiny one has two heads.
        two = replace(args.parallel_config, world_size=2, ulysses_degree=2)
        assert choose(two, denoisers(pipe)).context_degree == 2
    finish_settings(pipe, args.pipeline)


def test_pinned_weights_leave_half_of_what_the_host_has_left() -> None:
    part = torch.nn.Linear(10, 10, bias=False)
    assert may_pin([part, part], 2 * 2 * 400)
    assert not may_pin([part, part], 2 * 2 * 400 - 1)
