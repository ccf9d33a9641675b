"""Memory and speed settings: what changes no picture, and what is refused with a fix."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend

from configs.errors import ModelLoadFailed
from configs.stage_config import PipelineSettings, Quantization
from configs.stage_fields import WarmupShape
from tests.engine.conftest import BUNDLED, MakeParameters, count_decodes, plan
from tests.engine.recorder import Recorder
from tests.engine.tiny_families import save_family
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.engine.loading.settings import (
    apply_settings,
    compile_blocks,
    finish_settings,
    offload_layers,
    offload_parts,
)
from workers.engine.progress import Interrupted
from workers.engine.warm_up import WarmUpRequests

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_family(name, tmp_path_factory.mktemp(name))
        for name in ("stable_diffusion", "flux")
    }


def served(pipe: Any, **settings: Any) -> Engine:
    return Engine(pipe, inspect_abilities(pipe, {}), PipelineSettings(**settings))


def load(folder: Path, **settings: Any) -> Any:
    pipe = load_pipeline(plan(folder, pipeline=PipelineSettings(**settings)))
    finish_settings(pipe, PipelineSettings(**settings))
    return pipe


@pytest.fixture(autouse=True)
def usual_attention() -> Iterator[None]:
    """The backend set last is also that of what has none of its own, in the whole process."""
    with attention_backend():
        yield


def pixels(engine: Engine, parameters: Any) -> Any:
    made = engine.generate(parameters, Recorder())
    return np.stack([np.asarray(image, np.int16) for image in made.images])


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("stable_diffusion", {"vae_use_slicing": True}),
        ("stable_diffusion", {"channels_last": True}),
        ("flux", {"attention_backend": "native"}),
        ("flux", {"attention_backend": "_native_math"}),
    ],
)
def test_a_setting_changes_no_picture(
    families: dict[str, Path], parameters: MakeParameters, name: str, setting: dict[str, Any]
):
    asked = parameters(num_inference_steps=2, num_outputs_per_prompt=2)
    plain = pixels(served(load(families[name])), asked)
    assert np.abs(pixels(served(load(families[name], **setting)), asked) - plain).max() <= 1


def test_slices_and_tiles_are_decoded_one_by_one(
    families: dict[str, Path], parameters: MakeParameters
):
    pipe = load(families["stable_diffusion"], vae_use_slicing=True, vae_use_tiling=True)
    shapes = []
    pipe.vae.decoder.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    served(pipe).generate(parameters(num_outputs_per_prompt=2), Recorder())
    whole = 64 // pipe.vae_scale_factor
    assert {shape[0] for shape in shapes} == {1}
    assert max(max(shape[2:]) for shape in shapes) < whole
    assert len(shapes) > 2


def test_channels_last_is_the_layout_of_the_weights(families: dict[str, Path]):
    pipe = load(families["stable_diffusion"], channels_last=True)
    for convolution in (pipe.unet.conv_in, pipe.vae.decoder.conv_in):
        assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("offload", [offload_parts, offload_layers])
@pytest.mark.parametrize("name", ["stable_diffusion", "flux"])
def test_offload_gives_the_same_picture_and_stays_on(
    families: dict[str, Path], parameters: MakeParameters, name: str, offload: Any
):
    """On a CPU the parts go from it to itself, through the same hooks."""
    asked = parameters(num_inference_steps=2)
    plain = pixels(served(load(families[name])), asked)
    pipe = load(families[name])
    offload(pipe, CPU)
    settings = PipelineSettings(enable_cpu_offload=offload is offload_parts)
    engine = Engine(pipe, inspect_abilities(pipe, {}), settings, max_num_seqs=4)
    hooks = list(getattr(pipe, "_all_hooks", []))
    decodes = count_decodes(pipe)
    with pytest.raises(Interrupted):
        engine.generate(asked, Recorder(stop_at=2))
    assert not decodes
    for _ in range(2):
        assert np.abs(pixels(engine, asked) - plain).max() <= 1
    assert getattr(pipe, "_all_hooks", []) == hooks
    if offload is offload_layers:  # the forwards still go through the rendezvous
        assert sum(engine.rendezvous.histogram.values()) > 4


def test_blocks_are_compiled(families: dict[str, Path], parameters: MakeParameters):
    asked = parameters(num_inference_steps=1)
    plain = pixels(served(load(families["stable_diffusion"])), asked)
    pipe = load(families["stable_diffusion"])
    # Traced as by the real one, which then takes half a minute to write and build C++.
    graphs: list[Any] = []

    def traced(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # Of any size in tests/engine/test_settings_together.py, which takes longer.
    compile_blocks(pipe, dynamic=False, backend=traced)
    assert np.abs(pixels(served(pipe), asked) - plain).max() <= 1
    layers = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert any("layer_norm" in layer for layer in layers)  # of the blocks
    assert not any("conv2d" in layer for layer in layers)  # of what is around them
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "setting", "says"),
    [
        (
            "flux",
            {"enable_cpu_offload": True},
            "enable_cpu_offload: true needs a CUDA device, and this replica runs on a CPU",
        ),
        (
            "flux",
            {"enable_layerwise_offload": True},
            "enable_layerwise_offload: true needs a CUDA device",
        ),
        (
            "stable_diffusion",
            {"attention_backend": "native"},
            "attention_backend: native does not go with StableDiffusionPipeline: UNet2DCond",
        ),
        (
            "flux",
            {"attention_backend": "quick"},
            "attention_backend: 'quick' is not available in diffusers; use one of",
        ),
        (
            "flux",
            {"attention_backend": "sage"},
            "attention_backend: sage does not go with FluxPipeline: ",
        ),
    ],
)
def test_what_family_or_device_cannot_take_is_refused(
    families: dict[str, Path], name: str, setting: dict[str, Any], says: str
):
    with pytest.raises(ModelLoadFailed) as caught:
        load(families[name], **setting)
    assert f"engine_args.{says}" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"vae_use_tiling": True}, "Small has no enable_tiling; leave it out"),
        ({"vae_use_slicing": True}, "Small has no enable_slicing; leave it out"),
        ({"channels_last": True}, "no convolution in it; leave it out"),
        (
            {"diffusion_compile_granularity": "regional"},
            "to benefit from faster compilation; set it to none",
        ),
    ],
)
def test_what_a_part_does_not_have_is_refused(
    families: dict[str, Path], setting: dict[str, Any], says: str
):
    class Small(torch.nn.Module):
        """An autoencoder without anything."""

    pipe = load(families["flux"])
    pipe.vae = Small()
    vars(pipe.transformer)["_repeated_blocks"] = None  # a denoiser of the older ones
    apply = finish_settings if "diffusion_compile_granularity" in setting else apply_settings
    with pytest.raises(ModelLoadFailed) as caught:
        apply(pipe, PipelineSettings(**setting))
    assert says in caught.value.message
    assert caught.value.message.startswith(f"engine_args.{next(iter(setting))}: ")


def test_every_warm_up_size_is_run(families: dict[str, Path]):
    pipe = load(families["stable_diffusion"])
    shapes = (WarmupShape(32, 48), WarmupShape(32, 32))
    engine = served(pipe, warmup_shapes=shapes)
    sizes = []
    pipe.unet.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[-2:]))
    engine.warm_up()
    scale = pipe.vae_scale_factor
    own = (engine.abilities.default_height // scale, engine.abilities.default_width // scale)
    assert list(dict.fromkeys(sizes)) == [
        own,
        (48 // scale, 32 // scale),
        (32 // scale, 32 // scale),
    ]


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("stable_diffusion", WarmupShape(33, 32), "33x32 is not a multiple of 8"),
        ("stable_diffusion", WarmupShape(32, 32, 9), "32x32x9 has frames, but the model makes im"),
        ("wan", WarmupShape(32, 32, 8), "32x32x8 has not 1 frame and a multiple of 4 more"),
        ("latte", WarmupShape(32, 32, 31), "32x32x31 has more than the 16 frames that"),
    ],
)
def test_a_warm_up_size_that_the_model_cannot_make_is_refused(
    tmp_path: Path, name: str, shape: WarmupShape, says: str
):
    pipe = load(save_family(name, tmp_path))
    abilities = inspect_abilities(pipe, {"width": 32, "height": 32})
    requests = WarmUpRequests(abilities, (shape,)).of_each_size()
    next(requests)
    with pytest.raises(ModelLoadFailed) as caught:
        next(requests)
    assert caught.value.message.startswith(f"engine_args.warmup_shapes: {says}")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (Quantization("int8"), "int8 cannot be used: it needs the package torchao: pip install"),
        (Quantization("fp8"), "it needs the package torchao: pip install torchao"),
        (Quantization("bitsandbytes_4bit"), "it needs the package bitsandbytes: pip install"),
        (Quantization("gguf", (), "/x.gguf"), "it needs the package gguf: pip install gguf"),
    ],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, wanted: Quantization, says: str
):
    monkeypatch.setattr("workers.devices.weights.find_spec", lambda _: None)
    with pytest.raises(ModelLoadFailed) as caught:
        load(BUNDLED, quantization=wanted)
    assert caught.value.message.startswith("engine_args.quantization: ")
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (Quantization("bitsandbytes_8bit"), "it needs a CUDA device; use int8 on a CPU"),
        (
            Quantization("int8", ("transformer",)),
            "the model has no part transformer; its parts are scheduler, text_encoder, tokenizer",
        ),
        (
            Quantization("gguf", ("unet", "vae"), "/x.gguf"),
            "one file is one part; name it in components: unet, vae",
        ),
    ],
)
def test_quantization_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: Quantization, says: str
):
    monkeypatch.setattr("workers.devices.weights.find_spec", lambda _: True)
    with pytest.raises(ModelLoadFailed) as caught:
        load(BUNDLED, quantization=wanted)
    assert says in caught.value.message
