"""The rows of each denoiser call dealt over groups of ranks, in which its sequence is shared."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from configs.errors import DeviceLost
from configs.stage_config import (
    EngineArgs,
    ParallelConfig,
    ReplicaPlan,
    RuntimeConfig,
    StageConfig,
)
from tests.engine.conftest import MakeParameters, SavedFamily, patient, plan
from tests.engine.forked_ranks import ranks
from tests.engine.rank_hooks import refuse
from tests.engine.recorder import Recorder
from tests.engine.test_denoiser_copies import adapter_weights, latents
from tests.engine.test_ranks import change, same
from tests.engine.test_sharing import PROMPTS, Starter, difference
from workers.devices import rank_processes
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline


def plan_of_four(model: Path) -> ReplicaPlan:
    """Two groups of two ranks, on four CPU cores or fewer."""
    parallel = ParallelConfig(4, ulysses_degree=2, cfg_parallel_size=2)
    args = EngineArgs(str(model), device="cpu", max_num_seqs=2, parallel_config=parallel)
    stage = StageConfig(0, RuntimeConfig((0, 1, 2, 3)), args)
    return ReplicaPlan("replica0", 0, stage, (0, 1, 2, 3))


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A plan of four cores sets four torch threads for what is not the denoiser."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(saved: SavedFamily) -> Path:
    return saved("flux")


@pytest.fixture(scope="module")
def of_four(folder: Path) -> Iterator[Engine]:
    read, beside = diffusers.DiffusionPipeline.from_pretrained, list[int]()

    def noted(*args: Any, **options: Any) -> Any:
        beside.append(len(ranks()))
        return read(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers.DiffusionPipeline, "from_pretrained", noted)
        engine = Engine.load(plan_of_four(folder))
    assert beside == [3]  # they load while rank 0 does
    patient(engine.rendezvous)
    yield engine
    engine.close()
    assert ranks() == []


def poison(engine: Engine, numbers: Sequence[int], value: float, error: Exception) -> None:
    """Have some ranks fail each call in which that is the largest value."""
    chunk: Any = engine.chunk
    hook = partial(refuse, value, error)
    method = "register_forward_pre_hook"
    change(chunk.ranks.processes, numbers, "transformer", method, hook, with_kwargs=True)


def call_with(pipe: Any, value: float) -> torch.Tensor:
    """Call the denoiser for two rows, the second of which has that value."""
    transformer = pipe.transformer
    config = transformer.config
    hidden = torch.ones(2, 16, config.in_channels)
    hidden[1] = value
    with torch.inference_mode():
        made: torch.Tensor = transformer(
            hidden_states=hidden,
            encoder_hidden_states=torch.ones(2, 8, config.joint_attention_dim),
            pooled_projections=torch.ones(2, config.pooled_projection_dim),
            timestep=torch.ones(2),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(8, 3),
            guidance=torch.ones(2) if config.guidance_embeds else None,
            return_dict=False,
        )[0]
    return made


def test_two_groups_make_what_one_device_makes(of_four: Engine, folder: Path):
    alone = load_pipeline(plan(folder))
    pipe = of_four.pipe
    assert len(ranks()) == 3
    for outputs in (1, 2, 3):
        expected = latents(alone, outputs)
        for _ in range(2):  # the first call of a kind checks itself
            assert same(latents(pipe, outputs), expected)
    alone.load_lora_weights(adapter_weights("flux"), adapter_name="strong")
    expected = latents(alone, 2)
    plain = latents(pipe, 2)
    pipe.load_lora_weights(adapter_weights("flux"), adapter_name="strong")
    assert same(latents(pipe, 2), expected)
    pipe.unload_lora_weights()
    assert same(latents(pipe, 2), plain)
    assert not same(plain, expected)


def test_requests_that_share_a_step_are_dealt_over_the_groups(
    of_four: Engine, folder: Path, parameters: MakeParameters
):
    alone = Engine.load(plan(folder))
    asked = [
        parameters(prompt=prompt, seed=seed, width=32, height=32, num_inference_steps=3)
        for seed, prompt in enumerate(PROMPTS[:2])
    ]
    start = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda each: of_four.generate(each, Starter(start)), asked))
    expected = [alone.generate(each, Recorder()) for each in asked]
    assert max(map(difference, made, expected)) <= 1
    assert max(of_four.rendezvous.histogram) == 2


@pytest.mark.parametrize(
    ("value", "error", "kind"),
    [
        (1e3, ValueError("poisoned"), RuntimeError),
        (1e4, torch.OutOfMemoryError("poisoned"), MemoryError),
    ],
)
def test_a_call_that_fails_in_the_second_group_fails_and_the_next_call_is_right(
    of_four: Engine, value: float, error: Exception, kind: type[Exception]
):
    pipe = of_four.pipe
    before = latents(pipe, 2)
    poison(of_four, (2, 3), value, error)
    with pytest.raises(kind, match="poisoned"):
        call_with(pipe, value)
    assert same(latents(pipe, 2), before)


def test_a_call_that_fails_in_rank_0_alone_is_undone_in_both_groups(of_four: Engine):
    pipe = of_four.pipe
    before = latents(pipe, 2)

    def refuse(*_: Any) -> None:
        raise ValueError("no output")

    handle = pipe.transformer.proj_out.register_forward_hook(refuse)
    with pytest.raises(ValueError, match="no output"):
        latents(pipe, 2)
    handle.remove()
    assert same(latents(pipe, 2), before)


def test_a_rank_of_the_second_group_that_fails_alone_ends_the_replica(
    of_four: Engine, monkeypatch: pytest.MonkeyPatch
):
    told: list[str] = []
    of_four.watch_devices(told.append)
    poison(of_four, (3,), 1e5, ValueError("poisoned"))
    monkeypatch.setattr(rank_processes, "UNDO_S", 1.0)
    expected = "rank 2 is still in a call that has failed: ValueError: poisoned"
    with pytest.raises(DeviceLost, match=expected):
        call_with(of_four.pipe, 1e5)
    assert told == [expected]
    of_four.close()
    assert ranks() == []
