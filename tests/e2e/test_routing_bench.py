"""The bench of the routing policies: a service of its own, a second API, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.settings import REPOSITORY
from tests.e2e.started import started_in

pytestmark = pytest.mark.slow

BENCH = (sys.executable, "-m", "scripts.lab.routing_bench", "--requests", "4", "--steps", "2")
RUN_S = 240


def test_both_policies_do_all_the_work_before_the_same_replicas(
    own_environ: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [*BENCH, "--rounds", "1"],
        cwd=REPOSITORY,
        env=own_environ,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    mixes = json.loads(done.stdout.splitlines()[-1])
    assert {mix["policy"] for mix in mixes} == {"round_robin", "least_work"}
    for mix in mixes:
        assert mix["steps"].keys() == {"replica0", "replica1"}
        assert sum(mix["steps"].values()) == 2 * 2 + 2 * 8
    assert not list(started_in(tmp_path))
    assert not list((tmp_path / "temp").glob("diffusion-routing-*"))
