"""Services that the end-to-end tests share or have to themselves."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.e2e.service import Service


@pytest.fixture(scope="session")
def service(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The bundled model on two replicas; a test that ends one starts it again."""
    running = Service(redis_url, f"e2e-{secrets.token_hex(4)}:", tmp_path_factory.mktemp("service"))
    try:
        running.start("replica0", "replica1")
        yield running
    finally:
        running.stop()
