"""Files without a record, since a process died between the two: the sweep collects them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from configs.settings import REPOSITORY, Settings
from routing.outputs import ORPHAN_AFTER_S
from routing.request import Status
from tests.integration.api_world import ABILITIES, Api, PlayedReplica
from tests.integration.conftest import ApiOpener
from tests.integration.routing_world import SUCCESS, Clock, World
from tests.pictures import data_url, picture

DYING = """
import os, signal
from configs.settings import load_settings
from routing.broker import Broker
from routing.connection import connect
from routing.router import Router

settings = load_settings()
router = Router(settings, connect(settings.redis_url), Broker(settings))
with router.stored("req_dying", {"req_dying/input-0.png": b"png"}):
    os.kill(os.getpid(), signal.SIGKILL)
"""
RED = data_url(picture(48, 32))


@pytest.fixture
def world(settings: Settings, redis_client: Redis) -> World:
    world = World(settings, redis_client, Clock(time.time()))
    world.start("replica0")
    return world


def noted(world: World) -> list[str]:
    ids: list[str] = world.redis.zrange(f"{world.settings.redis_prefix}loose", 0, -1)  # type: ignore[assignment]
    return ids


def an_hour_later(world: World) -> None:
    world.clock.forward(ORPHAN_AFTER_S + 120)  # whoever died noted it by the clock on the wall
    world.beat("replica0")
    assert world.sweep.run()


def test_what_a_process_stored_that_died_before_it_recorded_is_collected(world: World) -> None:
    environ = {
        **os.environ,
        "REDIS_URL": world.settings.redis_url,
        "REDIS_PREFIX": world.settings.redis_prefix,
        "OUTPUTS_URL": world.settings.outputs_url,
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run([sys.executable, "-c", DYING], env=environ, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    outputs = world.outputs
    outputs.write("req_of_another_service/1-0.png", b"png")
    assert world.sweep.run()
    assert outputs.names("req_dying") == ["req_dying/input-0.png"]
    an_hour_later(world)
    assert outputs.names("req_dying") == []
    assert noted(world) == []
    # What was never noted is not ours to touch.
    assert outputs.names("req_of_another_service") != []


def test_what_was_removed_by_a_process_that_died_over_its_files_is_collected(world: World) -> None:
    request = world.submit()
    world.outputs.write(f"{request.id}/input-0.png", b"png")
    world.records.cancel(request.id, remove=True)
    an_hour_later(world)
    assert world.outputs.names(request.id) == []
    assert noted(world) == []


def test_what_a_dying_replica_wrote_for_a_request_that_was_removed_is_collected(
    world: World,
) -> None:
    request = world.submit()
    claimed = world.claim("replica0")
    assert claimed is not None
    world.router.remove(request.id)
    world.outputs.write(f"{request.id}/1-0.png", b"png")
    assert not world.claims.finish(claimed, SUCCESS)
    an_hour_later(world)
    assert world.outputs.names(request.id) == []
    assert noted(world) == []


def test_a_removal_that_ended_well_leaves_nothing_to_do(world: World) -> None:
    request = world.submit()
    world.outputs.write(f"{request.id}/input-0.png", b"png")
    world.router.remove(request.id)
    assert world.outputs.names(request.id) == []
    assert noted(world) == []


def test_a_store_that_is_away_keeps_no_request_from_the_living(
    settings: Settings, redis_client: Redis, tmp_path: Path
) -> None:
    wall = tmp_path / "wall"
    wall.write_text("a file where the folder should be")
    world = World(replace(settings, outputs_url=f"file://{wall}"), redis_client)
    for name in ("replica0", "replica1"):
        world.start(name)
    world.run("replica0" if world.submit().replica == "replica0" else "replica1", 1.0)
    for _ in range(2):
        world.submit()
    world.orphans.note("req_lost")
    world.clock.forward(settings.retention_s + 1)
    world.beat("replica0")
    assert world.sweep.run()
    assert {r.replica for r in world.records.newest(status=Status.QUEUED)} == {"replica0"}


@pytest.mark.parametrize("full", [False, True])
def test_a_submit_leaves_no_note_whether_accepted_or_refused(
    api_settings: Settings, open_api: ApiOpener, full: bool
) -> None:
    api = open_api(replace(api_settings, max_waiting_per_replica=1))
    editing(api)
    if full:
        api.submitted()
    answer = api.submit({"Idempotency-Key": "one"}, image=RED)
    assert answer.status_code == (429 if full else 202)
    if not full:
        assert api.submit({"Idempotency-Key": "one"}, image=RED).status_code == 200
    assert noted_of(api) == []


def test_the_files_of_an_edited_request_stay(api: Api) -> None:
    editing(api)
    request_id = api.submitted()["id"]
    assert api.patch(request_id, image=RED).status_code == 200
    later = World(api.service.settings, api.service.redis, Clock(time.time()))
    later.clock.forward(ORPHAN_AFTER_S + 1)
    assert later.orphans.old() == [request_id]
    later.sweep.run()
    assert later.orphans.old() == []
    assert len(later.outputs.names(request_id)) == 1


def editing(api: Api) -> PlayedReplica:
    return api.replica().load(
        replace(ABILITIES, tasks=("text-to-image", "image-to-image"), max_images=1)
    )


def noted_of(api: Api) -> list[str]:
    service = api.service
    return service.redis.zrange(f"{service.settings.redis_prefix}loose", 0, -1)  # type: ignore[return-value]
