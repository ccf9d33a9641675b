"""The output store where writes fail midway, as on a disk that is full.

The tests run in a process of its own in which the system refuses files beyond a size
(RLIMIT_FSIZE): ``write`` stores the first bytes and then fails, as on a full disk, and needs no
right to mount one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs.errors import OutputWriteFailed
from configs.settings import REPOSITORY
from routing.outputs import OutputStore
from tests.integration.routing_world import World
from workers.engine.generation import Generation
from workers.outputs import OutputWriter

LIMIT = 64 * 1024
PROGRAM = """
import json, os, resource, sys
from configs.errors import OutputWriteFailed
from routing.outputs import OutputStore

folder, recovers_after = sys.argv[1], int(sys.argv[2])
LIMIT, paused, seen = 64 * 1024, [], []

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def sleep(seconds):
    paused.append(seconds)
    seen.append([name for _, _, names in os.walk(folder) for name in names])
    if len(paused) == recovers_after:
        limit(resource.RLIM_INFINITY)

store = OutputStore("file://" + folder, sleep=sleep)
limit(LIMIT)
try:
    store.write("req_1/1-0.png", os.urandom(4 * LIMIT))
    error = None
except OutputWriteFailed as failed:
    error = [str(failed), type(failed.__cause__).__name__, failed.__cause__.errno]
store.write("req_2/1-0.png", bytes(1000))
print(json.dumps({"error": error, "paused": paused, "seen": seen}))
"""


def _write(folder: Path, recovers_after: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what the process tells, and the files it left with their sizes."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(recovers_after)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    return json.loads(done.stdout), files


def test_a_store_that_stays_full_is_tried_again_and_keeps_nothing(tmp_path: Path) -> None:
    told, files = _write(tmp_path, recovers_after=0)
    message, kind, number = told["error"]
    assert "after 4 tries" in message
    assert (kind, os.strerror(number)) == ("OSError", "File too large")
    assert told["paused"] == [0.25, 0.5, 1.0]
    assert told["seen"] == [[], [], []]  # nor between two tries
    assert files == {"req_2/1-0.png": 1000}


@pytest.mark.parametrize("recovers_after", [1, 3])
def test_a_store_that_has_room_again_in_time_takes_it(tmp_path: Path, recovers_after: int) -> None:
    told, files = _write(tmp_path, recovers_after)
    assert told["error"] is None
    assert told["paused"] == [0.25, 0.5, 1.0][:recovers_after]
    assert files == {"req_1/1-0.png": 4 * LIMIT, "req_2/1-0.png": 1000}


def test_of_several_outputs_none_stays_where_one_cannot_be_stored(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "several"
    store = OutputStore(f"file://{folder}", sleep=lambda _s: None)
    request = world.submit()
    # Where the second is written first there is something that can neither be written nor removed.
    (folder / request.id / ".1-1.png.part").mkdir(parents=True)
    picture = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    made = Generation((picture,) * 3, (1, 2, 3), "DDIMScheduler", 4, 0.1, 0.1, 0.1, 1.0)
    with pytest.raises(OutputWriteFailed, match="IsADirectoryError"):
        OutputWriter(store, metadata=False).write(request, made)
    assert store.names(request.id) == []


@pytest.fixture
def world(settings: Any, redis_client: Any) -> World:
    world = World(settings, redis_client)
    world.start("replica0")
    return world
