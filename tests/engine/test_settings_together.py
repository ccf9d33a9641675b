"""Settings that may stand beside each other: quantization, adapters, offload, caches, threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks import HookRegistry
from diffusers.hooks.group_offloading import LazyPrefetchGroupOffloadingHook
from diffusers.quantizers.gguf.utils import GGUFParameter

from configs.parameters import TEXT_TO_IMAGE, Lora, Parameters
from configs.stage_config import PipelineSettings, Quantization
from scripts.lab.families import save_family
from scripts.lab.family_trial import Watcher, pixels, small_request, together
from tests.engine.conftest import patient, plan
from tests.engine.gguf_files import quantized_file
from tests.engine.lora_files import save_lora
from workers.devices.weights import can_rise
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.engine.loading.settings import compile_blocks, offload_layers, offload_parts
from workers.patches import keep_forward

CPU = torch.device("cpu")
PROMPTS = ("a star", "a red circle", "blue", "a heart on a white ground")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("flux", tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def quantization(flux: Path) -> Quantization:
    return Quantization("gguf", ("transformer",), str(quantized_file(flux, flux / "flux.gguf")))


def asked_of(engine: Engine, **changes: Any) -> Parameters:
    return small_request(engine.abilities, TEXT_TO_IMAGE, **changes)


def made(engine: Engine, **changes: Any) -> Any:
    return pixels(engine.generate(asked_of(engine, **changes), Watcher()))


def test_a_quantized_denoiser_is_one_and_takes_adapters_and_batch(
    flux: Path, quantization: Quantization, tmp_path: Path
):
    plain = Engine.load(plan(flux))
    save_lora(tmp_path / "style.safetensors", {"transformer": plain.pipe.transformer}, 1)
    settings = PipelineSettings(quantization=quantization, lora_dir=str(tmp_path))
    engine = Engine.load(plan(flux, pipeline=settings, max_num_seqs=4))
    weights = list(engine.pipe.transformer.parameters())
    assert sum(isinstance(each, GGUFParameter) for each in weights) > 10
    usual = made(engine)
    assert 0 < np.abs(usual - made(plain)).mean() < 8

    style = (Lora("style"),)
    assert np.abs(made(engine, lora=style) - usual).max() > 8
    assert np.array_equal(made(engine), usual)
    patient(engine.rendezvous)
    asked = [
        asked_of(engine, seed=seed, lora=lora, num_inference_steps=5)
        for seed, lora in enumerate(((), (), style, style))
    ]
    alone = [engine.generate(each, Watcher()) for each in asked]
    for one, other in zip(together(engine, asked), alone, strict=True):
        assert np.abs(pixels(one) - pixels(other)).max() <= 1
        assert one.batch_mean > 1


@pytest.mark.parametrize("name", ["stable_diffusion", "flux"])
def test_threads_share_a_denoiser_whose_layers_come_and_go(tmp_path: Path, name: str):
    save_family(name, tmp_path)
    plain = load_pipeline(plan(tmp_path))
    expected = Engine(plain, inspect_abilities(plain, {}))
    pipe = load_pipeline(plan(tmp_path, dtype="bfloat16"))
    assert can_rise([pipe.vae])
    offload_layers(pipe, CPU)
    # It would overwrite float32 with its copies.
    assert not can_rise([pipe.components["transformer" if name == "flux" else "unet"], pipe.vae])
    pipe = load_pipeline(plan(tmp_path))
    offload_layers(pipe, CPU)
    abilities = inspect_abilities(pipe, {"width": 64, "height": 64})
    settings = PipelineSettings(enable_layerwise_offload=True)
    engine = Engine(pipe, abilities, settings, max_num_seqs=4)
    engine.warm_up()
    asked = [asked_of(engine, seed=seed, prompt=PROMPTS[seed % 4]) for seed in range(8)]

    def generate(parameters: Parameters) -> Any:
        with engine.request_coming():
            return engine.generate(parameters, Watcher())

    with ThreadPoolExecutor(4) as pool:
        shared = list(pool.map(generate, asked))
    for one, parameters in zip(shared, asked, strict=True):
        alone = expected.generate(parameters, Watcher())
        assert np.abs(pixels(one) - pixels(alone)).max() <= 1
    assert max(engine.rendezvous.histogram) > 1


@pytest.mark.parametrize("kept", [True, False])
def test_a_denoiser_whose_layers_are_fetched_ahead_is_shared_after_its_first_call_too(
    flux: Path, kept: bool
):
    """As on CUDA, where a hook of the offload learns the order of the layers and goes."""
    expected = Engine.load(plan(flux))
    pipe = load_pipeline(plan(flux))
    pipe.transformer.enable_group_offload(
        onload_device=CPU, offload_type="block_level", num_blocks_per_group=1
    )
    HookRegistry.check_if_exists_or_initialize(pipe.transformer).register_hook(
        LazyPrefetchGroupOffloadingHook(), "lazy_prefetch_group_offloading"
    )
    if kept:
        keep_forward(pipe.transformer)
    settings = PipelineSettings(enable_layerwise_offload=True)
    engine = Engine(pipe, inspect_abilities(pipe, {}), settings, max_num_seqs=4)
    asked = asked_of(engine)
    for _ in range(2):
        made = engine.generate(asked, Watcher())
        assert np.abs(pixels(made) - pixels(expected.generate(asked, Watcher()))).max() <= 1
    # Without, all but the first call pass the rendezvous by.
    assert engine.rendezvous.histogram == {1: 2 * asked.num_inference_steps if kept else 1}


@pytest.mark.parametrize(
    ("backend", "quantized"), [("first_block_cache", True), ("pyramid_attention_broadcast", False)]
)
def test_a_cache_works_beside_offload_and_compiled_blocks(
    flux: Path, quantization: Quantization, backend: str, quantized: bool
):
    options: dict[str, Any] = {"threshold": 0.5}
    if backend == "pyramid_attention_broadcast":
        options = {
            "spatial_attention_block_skip_range": 2,
            "spatial_attention_timestep_skip_range": [0, 1000],
        }
    settings = PipelineSettings(
        cache_backend=backend,
        cache_config=options,
        quantization=quantization if quantized else None,
    )

    def pictures(prepare: Any) -> list[Any]:
        pipe = load_pipeline(plan(flux, pipeline=settings))
        prepare(pipe)
        engine = Engine(pipe, inspect_abilities(pipe, {"num_inference_steps": 8}), settings)
        return [
            made(engine, seed=seed, num_inference_steps=steps) for seed, steps in ((3, 4), (7, 3))
        ]

    expected = pictures(lambda _: None)
    prepared = [lambda pipe: offload_layers(pipe, CPU), lambda pipe: offload_parts(pipe, CPU)]
    if not quantized:  # once: to trace blocks takes seconds
        prepared.append(lambda pipe: compile_blocks(pipe, dynamic=True, backend="eager"))
    for prepare in prepared:
        assert all(map(np.array_equal, pictures(prepare), expected))
    torch.compiler.reset()
