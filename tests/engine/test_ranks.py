"""Ranks that share the sequence of each denoiser call make what one process makes."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import PicklingError
from typing import Any

import diffusers
import pytest
import torch

from configs.errors import DeviceLost, ModelLoadFailed
from configs.stage_config import EngineArgs, ParallelConfig, PipelineSettings, Quantization
from scripts.lab.families import FAMILIES
from tests.engine.conftest import SavedFamily
from tests.engine.forked_ranks import ranks
from tests.engine.gguf_files import quantized_file
from tests.engine.rank_hooks import refuse_any
from tests.engine.test_denoiser_copies import adapter_weights, latents, plan_of_two
from tests.engine.test_sharing import PROMPTS
from tests.waiting import wait_until
from workers.devices.chunk import DeviceChunk, choose, denoisers
from workers.devices.copies import open_device_threads
from workers.devices.rank_messages import READY, MethodCall, pack
from workers.devices.rank_processes import RankProcesses
from workers.devices.ranks import Ranks
from workers.engine.loader import load_pipeline
from workers.families import DENOISER_MANNERS
from workers.patches import share_plan

TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A plan of two cores sets two torch threads for what is not the denoiser."""
    yield
    torch.set_num_threads(1)


def change(
    processes: RankProcesses,
    numbers: Sequence[int],
    denoiser: str,
    method: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Have some ranks call a method of their denoiser."""
    packed, _ = pack((args, kwargs), torch.device("meta"))
    processes.tell(MethodCall(denoiser, method, packed), numbers)
    assert set(processes.answers(numbers).values()) == {READY}


OTHERS: dict[str, dict[str, Any]] = {
    "qwen_image": {"negative_prompt": "blue and green", "true_cfg_scale": 3.0},
    "wan": {"num_frames": 5},
}


def output(name: str, pipe: Any) -> torch.Tensor:
    with torch.inference_mode():
        made: torch.Tensor = pipe(
            prompt=PROMPTS[0],
            height=48,
            width=48,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            **OTHERS[name],
        )[0]
    return made


def test_families_make_on_two_ranks_what_they_make_on_one_until_one_is_out_of_memory(
    tmp_path: Path,
):
    pipes, alone = {}, {}
    for name in OTHERS:
        torch.manual_seed(0)
        pipe = pipes[name] = FAMILIES[name]()
        pipe.set_progress_bar_config(disable=True)
        pipe.transformer.eval().save_pretrained(tmp_path / name)
        alone[name] = output(name, pipe)
    args = EngineArgs(str(tmp_path), parallel_config=ParallelConfig(2, ulysses_degree=2))
    (device_thread, *_) = opened = open_device_threads("cpu", 2)
    started = Ranks.start(
        args, {name: pipe.transformer for name, pipe in pipes.items()}, device_thread
    )
    try:
        for name, pipe in pipes.items():
            assert same(output(name, pipe), alone[name])
        told: list[str] = []
        started.watch(told.append)
        hook = partial(refuse_any, torch.OutOfMemoryError("too little memory"))
        change(started.processes, (1,), name, "register_forward_pre_hook", hook)
        expected = "rank 1 of 2 .*failed in a call in which rank 0 did not: OutOfMemoryError: too"
        with pytest.raises(DeviceLost, match=expected):
            output(name, pipe)
        assert len(told) == 1
    finally:
        started.close()
        for each in opened:
            each.close()


@pytest.fixture(scope="module")
def flux_folder(saved: SavedFamily) -> Path:
    return saved("flux")


@pytest.fixture(scope="module")
def shared(flux_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pipeline whose denoiser, of quantized weights, runs on two ranks; what it made alone."""
    file = quantized_file(flux_folder, tmp_path_factory.mktemp("quantized") / "flux.gguf")
    wanted = Quantization("gguf", ("transformer",), str(file))
    plan = plan_of_two(flux_folder)  # it takes the way of ranks without being told
    args = replace(plan.stage.engine_args, pipeline=PipelineSettings(quantization=wanted))
    plan = replace(plan, stage=replace(plan.stage, engine_args=args))
    pipe = load_pipeline(plan)
    adapter = adapter_weights("flux")
    alone = latents(pipe), latents(pipe, size=48)
    pipe.load_lora_weights(adapter, adapter_name="strong")
    adapted = latents(pipe)
    pipe.unload_lora_weights()
    chunk = DeviceChunk.open(pipe, plan)
    yield pipe, (*alone, adapted), chunk
    chunk.close()
    assert ranks() == []


def same(made: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((made - expected).abs().max() <= 1e-4 * expected.abs().max())


def test_two_ranks_of_quantized_weights_make_what_one_makes(shared: Any, flux_folder: Path):
    pipe, (alone, _, _), _ = shared
    assert len(ranks()) == 1
    assert same(latents(pipe), alone)
    assert not same(alone, latents(load_pipeline(plan_of_two(flux_folder))))
    if len(os.sched_getaffinity(0)) > 1:
        assert ranks()[0].cpu_affinity() == sorted(os.sched_getaffinity(0))[1:2]


def test_sequences_that_do_not_divide_are_shared_too(shared: Any):
    pipe, (_, alone, _), _ = shared
    assert alone.shape[1] % 2 == 1
    assert same(latents(pipe, size=48), alone)


@pytest.fixture
def sizes_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that rank 0 told the others so that it learns theirs, which its host waits for."""
    asked: list[int] = []
    gather = torch.distributed.all_gather

    def counted(into: list[torch.Tensor], part: torch.Tensor, **options: Any) -> Any:
        if part.dtype == torch.int64:
            asked.append(int(part))
        return gather(into, part, **options)

    monkeypatch.setattr(torch.distributed, "all_gather", counted)
    return asked


def test_ranks_ask_each_other_for_sizes_once_for_each_kind_of_call(
    shared: Any, sizes_asked: list[int]
):
    pipe, (alone, *_), _ = shared
    assert same(latents(pipe), alone)
    assert sizes_asked == []  # its lengths divide
    odd = latents(pipe, size=80)
    once = len(sizes_asked)
    layers = len(
        [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
    )
    assert once == 4 * layers + 1  # of one step out of several
    assert torch.equal(latents(pipe, size=80), odd)
    assert len(sizes_asked) == once
    wrong = {"hidden_states": torch.ones(1, 4, 3), "encoder_hidden_states": torch.ones(1, 4, 3)}
    places = {"img_ids": torch.ones(4, 3), "txt_ids": torch.ones(4, 3)}
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pipe.transformer(timestep=torch.ones(1), **wrong, **places)
    assert torch.equal(latents(pipe, size=80), odd)
    assert len(sizes_asked) == 2 * once


def test_an_error_in_all_ranks_is_that_of_the_call_and_the_next_call_is_right(shared: Any):
    pipe, (alone, _, _), _ = shared
    with pytest.raises(ValueError, match="Expected 1 arguments but got 0"):
        pipe.transformer(hidden_states=torch.ones(1, 4, 3))
    assert same(latents(pipe), alone)


def test_what_cannot_be_sent_fails_here_and_the_next_call_is_right(shared: Any):
    pipe, (alone, _, _), _ = shared
    with pytest.raises((TypeError, AttributeError, PicklingError)):
        pipe.transformer(hidden_states=threading.Lock())
    assert same(latents(pipe), alone)


def test_adapters_reach_the_ranks(shared: Any):
    pipe, (alone, _, adapted), _ = shared
    pipe.load_lora_weights(adapter_weights("flux"), adapter_name="strong")
    made = latents(pipe)
    assert same(made, adapted)
    assert not same(made, alone)
    pipe.unload_lora_weights()
    assert same(latents(pipe), alone)


def test_the_end_of_a_rank_is_told_and_no_call_succeeds_any_more(shared: Any):
    pipe, _, chunk = shared
    told: list[str] = []
    chunk.watch(told.append)
    ranks()[0].kill()
    wait_until(lambda: told, TIMEOUT_S, "the end of the rank")
    assert told == ["rank 1 of 2 was ended by signal 9"]
    with pytest.raises(DeviceLost, match="rank 1 of 2 was ended by signal 9"):
        latents(pipe)
    chunk.close()


def test_a_rank_that_cannot_load_its_part_is_told_with_the_cause(flux_folder: Path):
    plan = plan_of_two(flux_folder, ulysses_degree=2)
    pipe = load_pipeline(plan)
    weights = flux_folder / "transformer" / "diffusion_pytorch_model.safetensors"
    aside = weights.rename(weights.with_suffix(".aside"))
    try:
        with pytest.raises(ModelLoadFailed, match=r"rank 1 of 2 could not start: OSError.*no file"):
            DeviceChunk.open(pipe, plan)
    finally:
        aside.rename(weights)
    assert ranks() == []


@pytest.mark.parametrize(
    ("name", "parallel", "expected"),
    [
        (
            "stable_diffusion",
            {"ulysses_degree": 2},
            "no working plan for sharing the sequence of UNet2DC",
        ),
        ("pixart", {"ulysses_degree": 2}, "PixArtTransformer2DModel; use cfg_parallel_size"),
        ("ltx", {"ulysses_degree": 2}, "LTXVideoTransformer3DModel; use cfg_parallel_size"),
        ("flux", {"ring_degree": 2}, "ring_degree 2 needs CUDA devices and dtype bfloat16"),
        ("flux", {"ulysses_degree": 4}, "ulysses_degree 4 is more than the 2 heads"),
    ],
)
def test_what_a_model_cannot_do_is_refused_with_a_fix(
    name: str, parallel: dict[str, Any], expected: str
):
    found = denoisers(FAMILIES[name]())
    with pytest.raises(ModelLoadFailed, match=expected):
        choose(ParallelConfig(world_size=2, **parallel), found)


@pytest.mark.parametrize(
    ("name", "way"),
    [("stable_diffusion", "cfg"), ("stable_diffusion_3", "cfg"), ("flux", "context")],
)
def test_without_a_word_the_way_follows_from_the_model(name: str, way: str):
    chosen = choose(ParallelConfig(world_size=2), denoisers(FAMILIES[name]()))
    assert (chosen.way, chosen.world_size) == (way, 2)


def test_one_sample_models_are_those_whose_pipelines_do_not_batch_guidance():
    one_row = [name for name, manners in DENOISER_MANNERS.items() if manners.one_row_calls]
    assert one_row
    for name in one_row:
        assert share_plan(getattr(diffusers, name)) is not None
