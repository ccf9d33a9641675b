"""The tables of `routing/keys.py` are the one place where keys and fields of Redis are spelled."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
from redis import Redis

from configs.parameters import TEXT_TO_VIDEO
from configs.settings import Settings
from routing.broker import Broker
from routing.keys import RECORD, Key, Keys
from routing.lua import Scripts, linked, source
from routing.replica import Command, LoadedModel
from routing.request import Priority, Request, Webhook
from tests.integration.api_world import ABILITIES
from tests.integration.routing_world import MODEL, STAGE, World, parameters

MOVED = "moved:"
KINDS = {name: kind for name, kind in vars(Keys).items() if isinstance(kind, Key)}
HELD_ELSEWHERE = {"queue", "sweep"}  # Celery's own, and a lock that goes with the sweep


@pytest.fixture
def world(settings: Settings, redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> World:
    """One whose replicas are told nothing, so that Celery leaves no keys."""
    for name in ("wake", "wake_webhooks", "cancel", "update", "ask_heartbeat"):
        monkeypatch.setattr(Broker, name, lambda *_: True)
    return World(settings, redis_client)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every key is somewhere else: whoever spells one by itself does not follow."""
    for name, kind in KINDS.items():
        elsewhere = dataclasses.replace(kind, pattern=MOVED + kind.pattern)
        monkeypatch.setattr(Keys, name, elsewhere, raising=False)
    source.cache_clear()
    yield
    source.cache_clear()


def names(world: World) -> set[str]:
    """Return all keys of this world, without the prefix."""
    prefix = world.settings.redis_prefix
    return {str(key).removeprefix(prefix) for key in world.redis.scan_iter(f"{prefix}*")}


def claimed(world: World, name: str) -> Request:
    request = world.claim(name)
    assert request is not None
    return request


def life(world: World) -> Iterator[None]:
    """Everything that happens to requests and replicas; pauses where there is something to see."""
    world.registry.publish_model(LoadedModel(MODEL, STAGE, ABILITIES))
    world.start("replica0")
    webhook = Webhook("https://example.org/", ("started", "progress", "ended"))
    first = world.submit(webhook=webhook, idempotency_key="mine", expires_in=50.0)
    to_video = parameters(task=TEXT_TO_VIDEO)
    video = world.submit(parameters=to_video, priority=Priority.HIGH, webhook=webhook)
    world.submit(affinity_key="home", client="me")
    world.records.edit(first, parameters(prompt="new"), Priority.LOW, timeout=9.0, expires_in=60.0)
    yield
    running = claimed(world, "replica0")
    assert running.id == video.id
    world.claims.progress(running, 1, 4, 0.1)
    world.claims.preview(running, 1, b"jpeg")
    yield
    world.run("replica0", 1.0)
    world.claims.hand_back(running, suspect=True)
    delivery = world.outbox.take()
    assert delivery is not None
    world.outbox.failed(delivery, "it is away", 5.0)
    world.clock.forward(100.0)
    assert world.claims.expire() == 1
    world.start("replica1")
    world.router.drain("replica0", 0.0)
    yield
    world.router.resume("replica0")
    world.registry.command("replica1", Command.RESTART, 0.0)
    world.start("replica1")
    taken = claimed(world, "replica1")
    world.router.cancel(taken.id)
    world.claims.move_crashed(taken)
    world.orphans.note("req_lost")
    world.router.remove(first.id)
    yield
    world.clock.forward(world.settings.retention_s + 4000)
    assert world.sweep.run()
    yield


def test_keys_are_of_the_kinds_in_the_table_and_all_of_these_occur(world: World) -> None:
    patterns = {
        name: re.compile(re.sub(r"\\{\\}", "[^:]+", re.escape(kind.pattern)))
        for name, kind in KINDS.items()
    }
    seen = set()
    for _ in life(world):
        for key in names(world):
            name = next(name for name, pattern in patterns.items() if pattern.fullmatch(key))
            assert world.redis.type(world.settings.redis_prefix + key) == KINDS[name].kind, key
            seen.add(name)
    assert seen == KINDS.keys() - HELD_ELSEWHERE


def test_nobody_else_spells_a_key(world: World, moved: None) -> None:
    world = World(world.settings, world.redis, world.clock)
    for _ in life(world):
        assert [key for key in names(world) if not key.startswith(MOVED)] == []
    # What they wrote there they also find there: the same requests and replicas are gone.
    assert not any(":req_" in key for key in names(world))


def test_a_field_that_the_table_lacks_is_refused(world: World) -> None:
    world.start("replica0")
    world.submit()
    running = claimed(world, "replica0")
    scripts = Scripts(world.redis, world.settings.redis_prefix)
    call = (running.id, running.attempt, running.owner, world.clock(), "succeeded")
    with pytest.raises(KeyError, match="no field colour"):
        scripts.call("finish", *call, fields={"colour": "red"})
    for text in ("return field.colour", "return key.colour(1)"):
        with pytest.raises(KeyError, match="colour"):
            linked(text)
    stored = world.redis.hgetall(Keys(world.settings.redis_prefix).request(running.id))
    assert {field.name for field in RECORD} >= stored.keys()
