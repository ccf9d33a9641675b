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
from tests.e2e.service import Answer, Service
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


def start(redis_url: str, folder: Path, model: Path, replicas: int, **parallel: Any) -> Service:
    """Replicas of two devices each, ready."""
    stage = {
        "stage_id": 0,
        "stage_type": "diffusion",
        "runtime": {"num_replicas": replicas},
        "engine_args": {
            "model": str(model),
            "device": "cpu",
            "parallel_config": {"world_size": 2, **parallel},
        },
    }
    file = folder / "stage.yaml"
    file.write_text(yaml.safe_dump({"stages": [stage]}))
    environ = {"MAX_ATTEMPTS": "3", "CPU_DEVICES": str(2 * replicas)}
    service = Service(redis_url, f"{folder.name}:", folder, file, environ)
    try:
        service.start(*(f"replica{number}" for number in range(replicas)))
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


def pixels(answer: Answer) -> np.ndarray[Any, Any]:
    return np.asarray(answer.image.convert("RGB")).astype(int)


def ranks(service: Service, replica: str) -> list[psutil.Process]:
    found = psutil.Process(service.processes[replica].pid).children(recursive=True)
    return [each for each in found if "workers.devices.rank" in each.cmdline()]


def affinities(service: Service) -> set[frozenset[int]]:
    """The cores of each thread of the replica."""
    threads = psutil.Process(service.processes["replica0"].pid).threads()
    return {frozenset(os.sched_getaffinity(thread.id)) for thread in threads}


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_denoiser_copies_make_the_pictures_of_one_device(redis_url: str, tmp_path: Path) -> None:
    service = start(redis_url, tmp_path, BUNDLED, 1)
    try:
        ended = service.ended(service.submit(guidance_scale=3.0, **ASKED)["id"])
        assert np.abs(pixels(service.output(ended)) - picture(BUNDLED)).max() <= 1
        cores = sorted(os.sched_getaffinity(0))[:2]
        assert {frozenset({core}) for core in cores} <= affinities(service)
        assert ranks(service, "replica0") == []
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
    """Two replicas of two ranks each, started at the same time on one host."""
    folder = tmp_path_factory.mktemp("ranks")
    service = start(redis_url, folder, flux, 2, ulysses_degree=2)
    yield service
    service.stop()


def test_two_replicas_of_ranks_make_the_pictures_of_one_device_each_in_one_process_tree(
    of_ranks: Service, flux: Path
) -> None:
    asked = [of_ranks.submit(guidance_scale=3.0, **ASKED) for _ in range(2)]
    made = [of_ranks.ended(each["id"]) for each in asked]
    assert {each["replica"] for each in made} == {"replica0", "replica1"}
    first, second = (of_ranks.output(each) for each in made)
    assert first.content == second.content
    assert np.abs(pixels(first) - picture(flux)).max() <= 1
    assert [len(ranks(of_ranks, name)) for name in ("replica0", "replica1")] == [1, 1]


def test_a_killed_rank_ends_the_replica_and_its_request_gets_another_attempt(
    of_ranks: Service,
) -> None:
    running = of_ranks.submit_to("replica0", **{**ASKED, "num_inference_steps": 150})
    of_ranks.at_step(running["id"], 1)
    ranks(of_ranks, "replica0")[0].kill()
    assert of_ranks.processes.pop("replica0").wait(30) == EXIT_DEVICE
    replica = of_ranks.call("GET", "/v1/replicas/replica0").json
    assert replica["state"] == "failed"
    assert "rank 1 of 2 was ended by signal 9" in replica["error"]
    assert "rank 1 of 2 was ended by signal 9" in of_ranks.log("replica0")
    ended = of_ranks.ended(running["id"])
    assert (ended["status"], ended["replica"], ended["attempt"]) == ("succeeded", "replica1", 2)


def test_no_rank_is_left_behind_by_a_stop(of_ranks: Service) -> None:
    """That of a kill, and of a whole service: test_rank_groups."""
    (rank,) = ranks(of_ranks, "replica1")
    rank.send_signal(signal.SIGTERM)  # as by whoever stops a whole process group
    of_ranks.submit(**{**ASKED, "num_inference_steps": 150})
    assert of_ranks.end("replica1", signal.SIGTERM) == 0
    wait_until(lambda: gone(rank), 10, "the end of the rank")
