"""Fixtures of the API, routing and launcher tests, over the test's own Redis keys and folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from configs.settings import Settings
from tests.integration.api_world import Api, PlayedReplica
from tests.integration.image_inputs import EDITING
from tests.integration.parts import Parts
from tests.integration.routing_world import World

ApiOpener = Callable[[Settings], Api]


@pytest.fixture
def open_api(redis_client: Redis) -> Iterator[ApiOpener]:
    """Opens as many APIs as API processes are wanted; all are closed at the end."""
    apis: list[Api] = []

    def open_one(settings: Settings) -> Api:
        apis.append(Api(settings))
        return apis[-1]

    yield open_one
    for api in apis:
        api.close()


@pytest.fixture
def api_settings(settings: Settings) -> Settings:
    """Played replicas beat only when a test says so, and must not die of that."""
    return replace(settings, heartbeat_expiry_s=3600.0)


@pytest.fixture
def api(api_settings: Settings, open_api: ApiOpener) -> Api:
    """One API process; call its `start` where a call is to be held."""
    return open_api(api_settings)


@pytest.fixture
def replica(api: Api) -> PlayedReplica:
    """One ready replica, replica0, with the tiny model."""
    return api.replica().load()


@pytest.fixture
def editing(api: Api) -> PlayedReplica:
    """A ready replica of a model that takes images."""
    return api.replica().load(EDITING)


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
