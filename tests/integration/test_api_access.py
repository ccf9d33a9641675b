"""The key: asked for on every call but the probes, taken as Bearer or as a Basic password."""

from __future__ import annotations

import dataclasses
import time
from base64 import b64encode

import pytest
from flask.testing import FlaskClient
from redis import Redis

from api.app import create_app
from configs.settings import Settings
from tests.integration.routing_world import World

KEY = "s3cret-k€y"


@pytest.fixture
def client(settings: Settings) -> FlaskClient:
    return create_app(dataclasses.replace(settings, api_key=KEY)).test_client()


def _basic(password: str) -> str:
    return "Basic " + b64encode(f"anyone:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/v1/requests", "/v1/replicas", "/", "/docs", "/metrics"])
def test_without_the_key_nothing_is_shown(client: FlaskClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 401
    assert answer.json is not None
    assert answer.json["error"]["code"] == "unauthorized"
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")
    assert KEY not in answer.text


@pytest.mark.parametrize("given", ["Bearer wrong", _basic("wrong"), "Digest x=y", "Bearer", ""])
def test_a_wrong_key_is_refused(client: FlaskClient, given: str) -> None:
    assert client.get("/v1/requests", headers={"Authorization": given}).status_code == 401


def test_the_key_opens_as_bearer_and_as_password(settings: Settings) -> None:
    key = "plain-key"
    client = create_app(dataclasses.replace(settings, api_key=key)).test_client()
    for given in (f"Bearer {key}", _basic(key)):
        assert client.get("/v1/requests", headers={"Authorization": given}).status_code == 200


def test_a_key_of_any_letters_works_as_a_password(client: FlaskClient) -> None:
    assert client.get("/v1/requests", headers={"Authorization": _basic(KEY)}).status_code == 200


def test_the_probes_stay_open(client: FlaskClient) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 503


def test_metrics_name_each_replica_and_its_state(settings: Settings, redis_client: Redis) -> None:
    world = World(settings, redis_client)
    world.clock.now = time.time()
    world.start("replica0")
    text = create_app(settings).test_client().get("/metrics").text
    labels = 'model="tiny",replica="replica0"'
    assert f'diffusion_replica_state{{{labels},state="ready"}} 1.0' in text
    assert f"diffusion_replica_waiting_requests{{{labels}}} 0.0" in text
    assert f'diffusion_requests_finished_total{{{labels},status="succeeded"}} 0.0' in text


def test_the_page_of_another_site_sends_no_form(settings: Settings, redis_client: Redis) -> None:
    client = create_app(settings).test_client()
    foreign = {"Sec-Fetch-Site": "cross-site"}
    for method in ("post", "patch", "delete"):
        answer = getattr(client, method)("/v1/requests/any", headers=foreign)
        assert (answer.status_code, answer.json["error"]["code"]) == (403, "forbidden")
    assert client.get("/v1/requests", headers=foreign).status_code == 200
    own = client.delete("/v1/requests/any", headers={"Sec-Fetch-Site": "same-origin"})
    assert own.status_code == 404
