"""A replica of four devices, two groups of two ranks, by the one command: from start to stop."""

from __future__ import annotations

import io
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

from configs.parameters import Parameters
from configs.stage_config import EngineArgs, ReplicaPlan, RuntimeConfig, StageConfig
from scripts.lab.families import save_family
from tests.e2e.launcher import Launcher
from tests.waiting import wait_until
from workers.engine.engine import Engine
from workers.engine.progress import SilentProgress

pytestmark = pytest.mark.slow

STOP_S = 20.0
ASKED: dict[str, Any] = {
    "prompt": "a red circle on a blue background",
    "seed": 7,
    "width": 32,
    "height": 32,
    "num_inference_steps": 3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("flux", tmp_path_factory.mktemp("flux"))


@pytest.fixture
def launcher(redis_binary: str, model: Path, tmp_path: Path) -> Iterator[Launcher]:
    """Not started; it has four CPU devices, on however many cores."""
    stage = {
        "stage_id": 0,
        "stage_type": "diffusion",
        "engine_args": {
            "model": str(model),
            "device": "cpu",
            "parallel_config": {"cfg_parallel_size": 2, "ulysses_degree": 2},
        },
    }
    file = tmp_path / "stage.yaml"
    file.write_text(yaml.safe_dump({"stages": [stage]}))
    made = Launcher(tmp_path, CPU_DEVICES="4", DRAIN_S="1", STAGE_CONFIGS_PATH=str(file))
    yield made
    made.close()


def pictures(launcher: Launcher, request: Any) -> list[np.ndarray[Any, Any]]:
    """The outputs of a request, as numbers that can be subtracted."""
    assert request["status"] == "succeeded", request
    found = []
    for output in request["outputs"]:
        with urllib.request.urlopen(launcher.url + output["url"]) as answer:
            image = Image.open(io.BytesIO(answer.read())).convert("RGB")
        found.append(np.asarray(image).astype(int))
    return found


def on_one_device(model: Path, outputs: int) -> list[np.ndarray[Any, Any]]:
    """What one core makes of the request, without a service."""
    stage = StageConfig(0, RuntimeConfig((0,)), EngineArgs(str(model), device="cpu"))
    engine = Engine.load(ReplicaPlan("replica0", 0, stage, (0,)))
    made = engine.generate(Parameters(num_outputs_per_prompt=outputs, **ASKED), SilentProgress())
    return [np.asarray(image.convert("RGB")).astype(int) for image in made.images]


def ranks(replica: psutil.Process) -> list[psutil.Process]:
    """The ranks of a replica, in the order of their numbers; they are its children themselves."""
    found = [each for each in replica.children() if "workers.devices.rank" in each.cmdline()]
    return sorted(found, key=lambda each: (each.create_time(), each.pid))


def test_four_ranks_serve_fail_and_end_as_one(launcher: Launcher, model: Path) -> None:
    launcher.start()
    first = psutil.Process(launcher.replica("replica0")["pid"])
    own = ranks(first)
    assert len(own) == 3
    assert {each.pid for each in first.children(recursive=True)} >= {each.pid for each in own}

    for outputs in (1, 2):  # a call of one row is that of the first group
        made = pictures(launcher, launcher.run(num_outputs_per_prompt=outputs, **ASKED))
        expected = on_one_device(model, outputs)
        assert len(made) == outputs
        for one, other in zip(made, expected, strict=True):
            assert np.abs(one - other).max() <= 1

    running = launcher.submit(steps=1000)
    wait_until(
        lambda: launcher.call(f"/v1/requests/{running}")["progress"]["step"] > 0, 60, "its steps"
    )
    first.kill()
    launcher.wait_for("replica0 ended with signal 9 (killed); starting again in ")
    psutil.wait_procs(own, STOP_S)
    assert not any(each.is_running() for each in own)

    assert launcher.end(signal.SIGTERM, STOP_S) == 0
    assert launcher.left() == []
