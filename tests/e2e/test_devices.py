"""Replicas of two devices: the pictures of one device, one process tree, nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from configs.parameters import Parameters
from configs.settings import REPOSITORY
from configs.stage_config import EngineArgs, ReplicaPlan, RuntimeConfig, StageConfig
from tests.e2e.service import Service
from tests.engine.tiny_families import save_family
from tests.waiting import wait_until
from workers.engine.engine import Engine
from workers.engine.progress import SilentProgress

pytestmark = pytest.mark.slow

BUNDLED = REPOSITORY / "models" / "tiny"
EXIT_DEVICE = 4
ASKED: dict[str, Any] = {
    "prompt": "a red circle on a blue background",
    "seed": 7,
    "width": 64,
    "height": 64,
    "num_inference_steps": 4,
}


def start(redis_url: str, folder: Path, model: Path, **parallel: Any) -> Service:
    """One replica of two cores, ready."""
    stage = {
        "stage_id": 0,
        "stage_type": "diffusion",
        "engine_args": {
            "model": str(model),
            "device": "cpu",
            "parallel_config": {"world_size": 2, **parallel},
        },
    }
    file = folder / "stage.yaml"
    file.write_text(yaml.safe_dump({"stages": [stage]}))
    service = Service(redis_url, f"{folder.name}:", folder, file, {"MAX_ATTEMPTS": "3"})
    try:
        service.start("replica0")
    except BaseException:
        service.stop()
        raise
    return service


def picture(model: Path) -> np.ndarray[Any, Any]:
    """What one core makes of the request, without a service."""
    args = EngineArgs(str(model), device="cpu")
    stage = StageConfig(0, RuntimeConfig((0,)), args)
    engine = Engine.load(ReplicaPlan("replica0", 0, stage, (0,)))
    (image,) = engine.generate(Parameters(guidance_scale=3.0, **ASKED), SilentProgress()).images
    return np.asarray(image).astype(int)


def served(service: Service) -> np.ndarray[Any, Any]:
    ended = service.ended(service.submit(guidance_scale=3.0, **ASKED)["id"])
    return np.asarray(service.output(ended).image.convert("RGB")).astype(int)


def ranks(service: Service) -> list[psutil.Process]:
    found = psutil.Process(service.processes["replica0"].pid).children(recursive=True)
    return [each for each in found if "workers.devices.rank" in each.cmdline()]


def affinities(service: Service) -> set[frozenset[int]]:
    """The cores of each thread of the replica."""
    threads = psutil.Process(service.processes["replica0"].pid).threads()
    return {frozenset(os.sched_getaffinity(thread.id)) for thread in threads}


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_denoiser_copies_make_the_pictures_of_one_device(redis_url: str, tmp_path: Path) -> None:
    service = start(redis_url, tmp_path, BUNDLED)
    try:
        assert np.abs(served(service) - picture(BUNDLED)).max() <= 1
        cores = sorted(os.sched_getaffinity(0))[:2]
        assert {frozenset({core}) for core in cores} <= affinities(service)
        assert ranks(service) == []
        assert service.end("replica0", signal.SIGTERM) == 0
    finally:
        service.stop()


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("flux", tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def of_ranks(
    redis_url: str, flux: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    service = start(redis_url, tmp_path_factory.mktemp("ranks"), flux, ulysses_degree=2)
    yield service
    service.stop()


@pytest.fixture
def ready(of_ranks: Service) -> Service:
    """The service, started again where a test has ended its replica."""
    if "replica0" not in of_ranks.processes:
        of_ranks.start_replica("replica0")
    of_ranks.wait_for("replica0", "ready")
    return of_ranks


def test_ranks_make_the_pictures_of_one_device_in_one_process_tree(
    ready: Service, flux: Path
) -> None:
    assert np.abs(served(ready) - picture(flux)).max() <= 1
    assert len(ranks(ready)) == 1


def test_a_killed_rank_ends_the_replica_and_its_request_gets_another_attempt(
    ready: Service,
) -> None:
    running = ready.submit(**{**ASKED, "num_inference_steps": 150})
    ready.at_step(running["id"], 1)
    ranks(ready)[0].kill()
    assert ready.processes.pop("replica0").wait(30) == EXIT_DEVICE
    replica = ready.call("GET", "/v1/replicas/replica0").json
    assert replica["state"] == "failed"
    assert "rank 1 of 2 was ended by signal 9" in replica["error"]
    assert "rank 1 of 2 was ended by signal 9" in ready.log("replica0")
    ready.start_replica("replica0")
    ended = ready.ended(running["id"])
    assert (ended["status"], ended["attempt"]) == ("succeeded", 2)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_is_left_behind(ready: Service, how: signal.Signals) -> None:
    (rank,) = ranks(ready)
    rank.send_signal(signal.SIGTERM)  # as by whoever stops a whole process group
    ready.submit(**{**ASKED, "num_inference_steps": 150})
    code = ready.end("replica0", how)
    assert code == (0 if how is signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: gone(rank), 10, "the end of the rank")


def test_replicas_of_ranks_start_at_the_same_time_on_one_host(
    redis_url: str, flux: Path, tmp_path: Path
) -> None:
    args = {"model": str(flux), "device": "cpu", "parallel_config": {"ulysses_degree": 2}}
    stage = {"stage_id": 0, "stage_type": "diffusion", "runtime": {"num_replicas": 2}}
    file = tmp_path / "stage.yaml"
    file.write_text(yaml.safe_dump({"stages": [{**stage, "engine_args": args}]}))
    service = Service(redis_url, f"{tmp_path.name}:", tmp_path, file, {"CPU_DEVICES": "4"})
    try:
        service.start("replica0", "replica1")
        made = [service.ended(service.submit(**ASKED)["id"]) for _ in range(2)]
        assert {each["replica"] for each in made} == {"replica0", "replica1"}
        first, second = (service.output(each).content for each in made)
        assert first == second
    finally:
        service.stop()
