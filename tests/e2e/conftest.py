"""What several end-to-end tests start their commands with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def own_environ(redis_binary: str, tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary folder is the test's own, which no file may outlive."""
    (tmp_path / "temp").mkdir()
    given = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    return {**given, "TMPDIR": str(tmp_path / "temp"), "DRAIN_S": "1"}
