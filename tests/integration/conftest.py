"""Fixtures of the API, routing and launcher tests, over the test's own Redis keys and folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from configs.settings import Settings
from tests.integration.api_world import Door, PlayedReplica
from tests.integration.image_inputs import EDITING
from tests.integration.parts import Parts
from tests.integration.routing_world import World

OpenDoor = Callable[[Settings], Door]


@pytest.fixture
def open_door(redis_client: Redis) -> Iterator[OpenDoor]:
    """Opens doors, as many as API processes are wanted; all are closed at the end."""
    doors: list[Door] = []

    def open_one(settings: Settings) -> Door:
        doors.append(Door(settings))
        return doors[-1]

    yield open_one
    for door in doors:
        door.close()


@pytest.fixture
def api_settings(settings: Settings) -> Settings:
    """Played replicas beat only when a test says so, and must not die of that."""
    return replace(settings, heartbeat_expiry_s=3600.0)


@pytest.fixture
def door(api_settings: Settings, open_door: OpenDoor) -> Door:
    """One API process; call its `start` where a call is to be held."""
    return open_door(api_settings)


@pytest.fixture
def replica(door: Door) -> PlayedReplica:
    """One ready replica, replica0, with the tiny model."""
    return door.replica().load()


@pytest.fixture
def editing(door: Door) -> PlayedReplica:
    """A ready replica of a model that takes images."""
    return door.replica().load(EDITING)


@pytest.fixture
def world(settings: Settings, redis_client: Redis) -> World:
    """A service without processes, in the test's own corner of Redis."""
    return World(settings, redis_client)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    """A supervisor over the test's own folder; what it started is ended."""
    parts = Parts(tmp_path)
    yield parts
    parts.stop(hurried=True)
