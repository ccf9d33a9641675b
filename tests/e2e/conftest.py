"""Services that the end-to-end tests share or have to themselves."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lab.families import save_family
from tests.e2e.service import Service

FILM = """
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {{devices: "0", num_replicas: 1}}
    engine_args: {{model: {model}, served_model_name: film, device: cpu}}
    default_sampling_params:
      {{width: 64, height: 64, num_frames: 9, num_inference_steps: 3, fps: 12}}
"""


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
    folder = tmp_path_factory.mktemp("film")
    model = save_family("ltx", folder / "model")
    stage_file = folder / "film.yaml"
    stage_file.write_text(FILM.format(model=model))
    running = Service(redis_url, f"film-{secrets.token_hex(4)}:", folder, stage_file)
    try:
        running.start("replica0")
        yield running
    finally:
        running.stop()


@pytest.fixture
def own_environ(redis_binary: str, tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary folder is the test's own, which no file may outlive."""
    (tmp_path / "temp").mkdir()
    given = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    return {**given, "TMPDIR": str(tmp_path / "temp"), "DRAIN_S": "1"}
