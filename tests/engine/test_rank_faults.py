"""Ranks that end, hang or fail before and after they have met: told with the cause, none left."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from configs.errors import DeviceLost, ModelLoadFailed
from configs.stage_config import EngineArgs
from scripts.lab.families import save_family
from tests.engine.forked_ranks import ranks
from tests.engine.rank_hooks import Unmovable, refuse_any
from tests.engine.test_denoiser_copies import latents, plan_of_two
from tests.waiting import wait_until
from workers.devices import rank_processes, rank_start
from workers.devices.chunk import DeviceChunk
from workers.devices.rank_messages import READY, MethodCall, Start, pack
from workers.devices.rank_processes import RankProcesses
from workers.devices.ranks import Ranks
from workers.engine.loader import load_pipeline

# Ranks that are well wait for each other for less, on a busy machine too.
SILENCE_S = 10.0
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A plan of two cores sets two torch threads for what is not the denoiser."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("flux", tmp_path_factory.mktemp("flux"))


def listening() -> set[str]:
    """The addresses on which this process and its ranks listen."""
    processes = (psutil.Process(), *ranks())
    connections = [each for one in processes for each in one.net_connections("tcp")]
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def test_a_rank_that_hangs_is_told_and_nothing_listens_beyond_this_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = plan_of_two(folder, ulysses_degree=2, collective_timeout_s=SILENCE_S)
    pipe = load_pipeline(plan)
    chunk = DeviceChunk.open(pipe, plan)
    told: list[str] = []
    chunk.watch(told.append)
    try:
        assert listening() == {"127.0.0.1"}
        latents(pipe)
        monkeypatch.setattr(rank_processes, "UNDO_S", 1.0)
        ranks()[0].suspend()
        expected = "rank 1 is still in a call that has failed: .*Timed out"
        with pytest.raises(DeviceLost, match=expected):
            latents(pipe)
        assert len(told) == 1
    finally:
        chunk.close()
    assert ranks() == []


def test_a_rank_that_runs_out_of_memory_alone_is_told_with_the_cause(folder: Path):
    plan = plan_of_two(folder, ulysses_degree=2)
    pipe = load_pipeline(plan)
    chunk: Any = DeviceChunk.open(pipe, plan)
    told: list[str] = []
    chunk.watch(told.append)
    try:
        hook = partial(refuse_any, torch.OutOfMemoryError("too little memory"))
        packed, _ = pack(((hook,), {}), torch.device("meta"))
        processes = chunk.ranks.processes
        processes.tell(MethodCall("transformer", "register_forward_pre_hook", packed))
        assert processes.answers((1,)) == {1: READY}
        expected = "rank 1 of 2 .*failed in a call in which rank 0 did not: OutOfMemoryError: too"
        with pytest.raises(DeviceLost, match=expected):
            latents(pipe)
        assert len(told) == 1
    finally:
        chunk.close()
    assert ranks() == []


def test_a_rank_that_ends_while_they_meet_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = plan_of_two(folder, ulysses_degree=2, collective_timeout_s=3.0)
    pipe = load_pipeline(plan)
    tell, join, over = RankProcesses.tell, Ranks.join, threading.Event()

    def tell_one_that_does_not_move(self: RankProcesses, message: Any) -> None:
        ranks()[0].suspend()
        tell(self, message)

    def join_without(self: Ranks, store: Any) -> None:
        try:
            ranks()[0].kill()
            join(self, store)
        finally:
            over.set()

    monkeypatch.setattr(RankProcesses, "tell", tell_one_that_does_not_move)
    monkeypatch.setattr(Ranks, "join", join_without)
    try:
        with pytest.raises(ModelLoadFailed, match="rank 1 of 2 was ended by signal 9"):
            DeviceChunk.open(pipe, plan)
    finally:
        assert over.wait(TIMEOUT_S)
    assert ranks() == []


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"core": 100_000}, "OSError"),
        ({"args": {"ulysses_degree": 4}}, "RuntimeError: Mesh should not be bigger"),
    ],
)
def test_a_rank_that_cannot_start_or_meet_the_others_is_told_with_the_cause(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], cause: str
):
    plan = plan_of_two(folder, ulysses_degree=2)
    pipe = load_pipeline(plan)

    def start(args: EngineArgs, **given: Any) -> Start:
        parallel = replace(args.parallel_config, **changed.get("args", {}))
        return Start(**{**given, **changed, "args": replace(args, parallel_config=parallel)})

    monkeypatch.setattr(rank_start, "Start", start)
    with pytest.raises(ModelLoadFailed, match=f"rank 1 of 2 .*{cause}"):
        DeviceChunk.open(pipe, plan)
    assert ranks() == []


def test_a_copy_for_which_there_is_no_memory_is_told_with_the_cause():
    plan = plan_of_two()
    pipe = load_pipeline(plan)
    before = set(threading.enumerate())
    pipe.unet.register_buffer("scarce", torch.ones(1).as_subclass(Unmovable))
    with pytest.raises(ModelLoadFailed, match=r"OutOfMemoryError: .*; use one device for each"):
        DeviceChunk.open(pipe, plan)
    wait_until(lambda: set(threading.enumerate()) <= before, TIMEOUT_S, "the end of its threads")
