"""Chaos: processes are killed, frozen and stopped under load; nothing accepted is lost.

The short form runs with the other tests. ``make chaos`` runs the long form (``CHAOS_REQUESTS=200``)
and prints the table of docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.chaos.history import Blow, History
from tests.e2e.service import Service
from tests.redis_server import RedisServer, running_redis
from tests.waiting import wait_until

REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "16"))
END_S = 600.0  # only a machine that does much else comes near it
COLUMNS = (
    *("case", "requests", "lost", "committed twice", "executed twice", "second attempts"),
    *("recovery, s", "all, s"),
)
REPLICAS = ("replica0", "replica1", "replica2")


@dataclass
class Chaos:
    """A service of three replicas on a durable Redis of its own."""

    service: Service
    redis: RedisServer

    def records(self) -> list[dict[str, str]]:
        """Return every record as Redis holds it."""
        with Redis(port=self.redis.port, decode_responses=True) as client:
            keys = list(client.scan_iter(f"{self.service.redis_prefix}request:*", count=1000))
            return [client.hgetall(key) for key in keys]

    def unfinished(self, ids: list[str]) -> list[tuple[str, str, str]]:
        """Return status, replica and attempt of those of these requests that have not ended."""
        with Redis(port=self.redis.port, decode_responses=True) as client:
            pipeline = client.pipeline(transaction=False)
            for request_id in ids:
                key = f"{self.service.redis_prefix}request:{request_id}"
                pipeline.hmget(key, "finished_at", "status", "replica", "attempt")
            return [(found[1], found[2], found[3]) for found in pipeline.execute() if not found[0]]

    def history(self) -> History:
        """Return all that happened to the newest requests."""
        with Redis(port=self.redis.port, decode_responses=True) as client:
            return History.read(client, self.service.redis_prefix)

    def kill(self, name: str) -> Blow:
        blow = Blow(name, time.time())
        self.service.end(name, signal.SIGKILL)
        return blow

    def restart(self, name: str) -> None:
        """Start a replica; the third as a second host would, whose numbers begin there."""
        offset = {"REPLICA_OFFSET": "2"} if name == "replica2" else {}
        self.service.start_replica(name, offset)

    def send(self, name: str, number: signal.Signals) -> None:
        self.service.processes[name].send_signal(number)


def _nothing(_chaos: Chaos) -> list[Blow]:
    return []


def _kill_one(chaos: Chaos) -> list[Blow]:
    return [chaos.kill("replica0")]


def _kill_two(chaos: Chaos) -> list[Blow]:
    return [chaos.kill("replica0"), chaos.kill("replica1")]


def _kill_and_restart_each(chaos: Chaos) -> list[Blow]:
    """One after the other, each back before its heartbeat would have expired."""
    blows = []
    for name in REPLICAS:
        blows.append(chaos.kill(name))
        chaos.restart(name)
    return blows


def _freeze(chaos: Chaos) -> list[Blow]:
    """A replica that wakes up after it was taken for dead, with what is now another's request."""
    blow = Blow("replica0", time.time())
    chaos.send("replica0", signal.SIGSTOP)
    wait_until(
        lambda: chaos.service.call("GET", "/v1/replicas/replica0").json["state"] == "gone",
        30,
        "the frozen replica to be taken for dead",
    )
    wait_until(
        lambda: chaos.service.call("GET", "/v1/replicas/replica0").json["running"] == 0,
        30,
        "its requests to be moved",
    )
    chaos.send("replica0", signal.SIGCONT)
    return [blow]


def _stop_and_restart(chaos: Chaos) -> list[Blow]:
    assert chaos.service.end("replica0", signal.SIGTERM) == 0
    chaos.restart("replica0")
    return []


def _restart_redis(chaos: Chaos) -> list[Blow]:
    chaos.redis.stop()
    chaos.redis.start()
    return []


def _kill_redis(chaos: Chaos) -> list[Blow]:
    chaos.redis.kill()
    chaos.redis.start()
    return []


def _kill_api(chaos: Chaos) -> list[Blow]:
    """The processes that answer, and then the one that would start them again."""
    for process in psutil.Process(chaos.service.processes["api"].pid).children():
        process.kill()
    chaos.kill("api")
    chaos.service.start_api()
    return []


CASES: dict[str, Callable[[Chaos], list[Blow]]] = {
    "no failure": _nothing,
    "SIGKILL one, no restart": _kill_one,
    "SIGKILL two, no restart": _kill_two,
    "SIGKILL each, restarted at once": _kill_and_restart_each,
    "SIGSTOP past the expiry, SIGCONT": _freeze,
    "SIGTERM and restart": _stop_and_restart,
    "Redis restarted": _restart_redis,
    "Redis SIGKILLed": _kill_redis,
    "API SIGKILLed": _kill_api,
}


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """The rows of docs/reliability.md, printed at the end."""
    rows = [
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
    ]
    yield rows
    print("", *rows, sep="\n")  # noqa: T201 - the table is the result


@pytest.fixture(scope="module")
def shared(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    folder = tmp_path_factory.mktemp("chaos")
    stage = folder / "stage.yaml"
    text = Path("configs/tiny_cpu.yaml").read_text()
    stage.write_text(text.replace("./models/tiny", str(Path("models/tiny").absolute())))
    with running_redis(redis_binary, folder, durable=True) as redis:
        service = Service(redis.url, "chaos:", folder, stage)
        try:
            service.start("replica0", "replica1")
            yield Chaos(service, redis)
        finally:
            service.stop()


@pytest.fixture
def chaos(shared: Chaos) -> Chaos:
    """All three replicas ready; the third shares a core, as a second host of one replica would."""
    service = shared.service
    for name in REPLICAS:
        running = service.processes.get(name)
        if running is None or running.poll() is not None:
            shared.restart(name)
    for name in REPLICAS:
        service.wait_for(name, "ready")
    return shared


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_accepted_is_lost_or_done_twice(chaos: Chaos, case: str, table: list[str]) -> None:
    service = chaos.service
    before = {record["id"] for record in chaos.records()}
    answers = service.submit_all(
        [{"prompt": "a red circle on a blue background", "seed": 7} for _ in range(REQUESTS)]
    )
    assert {answer.status for answer in answers} == {202}
    ids = [answer.json["id"] for answer in answers]
    service.at_step(ids[0], 1)
    started = time.monotonic()
    blows = CASES[case](chaos)

    def all_ended() -> bool:
        with contextlib.suppress(RedisError):
            left = chaos.unfinished(ids)
            assert not left, left
            return True
        return False

    wait_until(all_ended, END_S, f"{REQUESTS} requests to end")
    seconds = time.monotonic() - started
    assert {record["id"] for record in chaos.records()} - before == set(ids)
    records = {r["id"]: r for r in chaos.records() if r["id"] in ids}
    history = chaos.history().of(ids)
    lost = [request_id for request_id in ids if records[request_id]["status"] != "succeeded"]
    twice = [request_id for request_id in ids if history.commits(request_id) > 1]
    again = sum(int(record["attempt"]) > 1 for record in records.values())
    executed = sum(history.starts(request_id) > 1 for request_id in ids)
    recovery_s = max((history.recovery_s(blow) for blow in blows), default=None)
    shown = "" if recovery_s is None else f"{recovery_s:.1f}"
    table.append(
        f"| {case} | {REQUESTS} | {len(lost)} | {len(twice)} | {executed} | {again} "
        f"| {shown} | {seconds:.1f} |"
    )
    assert lost == []
    assert twice == []
    assert recovery_s != math.inf, "what ran there must be given to the living"
    for record in records.values():
        names = [f"{record['attempt']}-0.png"]
        wait_until(
            lambda i=record["id"], n=names: service.files(i) == n,  # type: ignore[misc]
            10,
            f"exactly the committed file of {record['id']}",
        )
    pictures = {
        (service.outputs / i / f"{r['attempt']}-0.png").read_bytes() for i, r in records.items()
    }
    assert len(pictures) == 1, "the same seed must be the same picture on every attempt"
