"""Ranks that end, hang or fail before and after they have met: told with the cause, none left."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from configs.errors import DeviceLost, ModelLoadFailed, NonFiniteOutput
from tests.engine.conftest import MakeParameters, SavedFamily, plan
from tests.engine.forked_ranks import ranks
from tests.engine.rank_hooks import Scarce, Unmovable
from tests.engine.recorder import Recorder
from tests.engine.test_denoiser_copies import adapter_weights, latents, plan_of_two
from tests.engine.test_ranks import change
from tests.engine.test_sharing import difference
from tests.waiting import wait_until
from workers.devices import rank_processes
from workers.devices.chunk import DeviceChunk
from workers.devices.copies import DeviceThread, open_device_threads
from workers.devices.rank_start import LoadingRanks
from workers.devices.ranks import Ranks
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline

# Ranks that are well wait for each other for less, on a busy machine too.
SILENCE_S = 15.0
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A plan of two cores sets two torch threads for what is not the denoiser."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(saved: SavedFamily) -> Path:
    return saved("flux")


def listening() -> set[str]:
    """The addresses on which this process and its ranks listen."""
    processes = (psutil.Process(), *ranks())
    connections = [each for one in processes for each in one.net_connections("tcp")]
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def described(pipe: Any) -> dict[str, tuple[str, torch.dtype]]:
    return {"transformer": (type(pipe.transformer).__name__, pipe.transformer.dtype)}


@pytest.fixture
def device_thread() -> Iterator[DeviceThread]:
    """That of rank 0."""
    (first, *_) = opened = open_device_threads("cpu", 2)
    yield first
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def in_half(folder: Path) -> Iterator[Engine]:
    """An engine of two ranks whose weights are half as wide."""
    pair = plan_of_two(folder, ulysses_degree=2, collective_timeout_s=SILENCE_S)
    args = replace(pair.stage.engine_args, dtype="float16")
    engine = Engine.load(replace(pair, stage=replace(pair.stage, engine_args=args)))
    yield engine
    engine.close()
    assert ranks() == []


@contextmanager
def spoilt(pipe: Any) -> Iterator[None]:
    """Rank 0 gets NaN of each call below float32."""

    def spoil(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if output.dtype is torch.float32 else output * float("nan")

    handle = pipe.transformer.proj_out.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def test_a_request_is_made_in_float32_by_all_ranks(
    in_half: Engine, folder: Path, parameters: MakeParameters
):
    asked = parameters(width=32, height=32, num_inference_steps=3, num_outputs_per_prompt=2)
    adapter = adapter_weights("flux")
    whole = load_pipeline(plan(folder, dtype="float16"))
    for pipe in (in_half.pipe, whole):
        pipe.load_lora_weights(adapter, adapter_name="strong")
    whole.to(torch.float32)
    expected = Engine(whole, inspect_abilities(whole, {})).generate(asked, Recorder())
    before = in_half.generate(asked, Recorder())

    with spoilt(in_half.pipe):
        made = in_half.generate(asked, Recorder())
    assert [warning for warning in made.warnings if "made in float32" in warning]
    assert difference(made, expected) <= 1
    assert difference(in_half.generate(asked, Recorder()), before) == 0


def test_a_rank_that_has_no_memory_for_float32_leaves_all_as_they_were(
    in_half: Engine, parameters: MakeParameters
):
    asked = parameters(width=32, height=32, num_inference_steps=3, num_outputs_per_prompt=2)
    before = in_half.generate(asked, Recorder())
    scarce = torch.ones(1, dtype=torch.float16).as_subclass(Scarce)
    chunk: Any = in_half.chunk
    change(chunk.ranks.processes, (1,), "transformer", "register_buffer", "scarce", scarce)
    failed = "a run in float32 failed: MemoryError: MemoryError: too little memory"
    with spoilt(in_half.pipe), pytest.raises(NonFiniteOutput, match=failed):
        in_half.generate(asked, Recorder())
    assert difference(in_half.generate(asked, Recorder()), before) == 0


def test_a_rank_that_hangs_is_told_and_nothing_listens_beyond_this_host(
    in_half: Engine, monkeypatch: pytest.MonkeyPatch
):
    told: list[str] = []
    in_half.watch_devices(told.append)
    assert listening() == {"127.0.0.1"}
    monkeypatch.setattr(rank_processes, "UNDO_S", 1.0)
    ranks()[0].suspend()
    expected = "rank 1 is still in a call that has failed: .*Timed out"
    with pytest.raises(DeviceLost, match=expected):
        latents(in_half.pipe)
    assert len(told) == 1
    in_half.close()
    assert ranks() == []


def test_a_rank_that_ends_while_they_meet_ends_the_start(folder: Path, device_thread: DeviceThread):
    pair = plan_of_two(folder, ulysses_degree=2, collective_timeout_s=3.0)
    pipe, args = load_pipeline(pair), pair.stage.engine_args
    loading = LoadingRanks.start(args, described(pipe), "cpu")
    loading.await_loaded()
    (rank,) = ranks()
    rank.suspend()
    untyped: Any = torch.distributed
    store = untyped.TCPStore("127.0.0.1", loading.store.port, is_master=False)
    before = store.num_keys()

    def start() -> None:
        Ranks.start(args, {"transformer": pipe.transformer}, device_thread, loading)

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(start)
        wait_until(lambda: store.num_keys() > before, TIMEOUT_S, "rank 0, which waits for rank 1")
        rank.kill()
        with pytest.raises(ModelLoadFailed, match="rank 1 of 2 was ended by signal 9"):
            started.result(TIMEOUT_S)
    device_thread.submit(bool).result(TIMEOUT_S)  # it waits there no longer
    assert ranks() == []


# That one which cannot load its part is told, tests/engine/test_ranks.py has.
def test_a_rank_that_cannot_meet_the_others_is_told_with_the_cause(
    folder: Path, device_thread: DeviceThread
):
    pair = plan_of_two(folder, ulysses_degree=2)
    pipe, args = load_pipeline(pair), pair.stage.engine_args
    too_wide = replace(args, parallel_config=replace(args.parallel_config, ulysses_degree=4))
    loading = LoadingRanks.start(too_wide, described(pipe), "cpu")
    cause = "RuntimeError: Mesh should not be bigger"
    with pytest.raises(ModelLoadFailed, match=f"rank 1 of 2 .*{cause}"):
        Ranks.start(args, {"transformer": pipe.transformer}, device_thread, loading)
    assert ranks() == []


def test_a_copy_for_which_there_is_no_memory_is_told_with_the_cause():
    pair = plan_of_two()
    pipe = load_pipeline(pair)
    before = set(threading.enumerate())
    pipe.unet.register_buffer("scarce", torch.ones(1).as_subclass(Unmovable))
    with pytest.raises(ModelLoadFailed, match=r"OutOfMemoryError: .*; use one device for each"):
        DeviceChunk.open(pipe, pair)
    wait_until(lambda: set(threading.enumerate()) <= before, TIMEOUT_S, "the end of its threads")
