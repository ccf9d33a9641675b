"""Chaos: processes are killed, frozen and stopped under load; nothing accepted is lost.

The short form runs with the other tests. ``make chaos`` runs the long form (``CHAOS_REQUESTS=200``)
and prints the table of docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis

from tests.e2e.service import Service
from tests.redis_server import RedisServer, running_redis
from tests.waiting import wait_until

REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "24"))
END_S = 240.0
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

    def commits(self) -> Counter[str]:
        """Return how often each request was recorded as succeeded."""
        with Redis(port=self.redis.port, decode_responses=True) as client:
            entries = client.xrange(f"{self.service.redis_prefix}changes")
        return Counter(entry["id"] for _, entry in entries if entry["status"] == "succeeded")

    def kill(self, name: str) -> None:
        self.service.end(name, signal.SIGKILL)

    def restart(self, name: str) -> None:
        self.service.start_replica(name)

    def send(self, name: str, number: signal.Signals) -> None:
        self.service.processes[name].send_signal(number)


def _nothing(_chaos: Chaos) -> None:
    return


def _kill_one(chaos: Chaos) -> None:
    chaos.kill("replica0")


def _kill_two(chaos: Chaos) -> None:
    chaos.kill("replica0")
    chaos.kill("replica1")


def _kill_and_restart_each(chaos: Chaos) -> None:
    """One after the other, each back before its heartbeat would have expired."""
    for name in REPLICAS:
        chaos.kill(name)
        chaos.restart(name)


def _freeze(chaos: Chaos) -> None:
    """A replica that wakes up after it was taken for dead, with what is now another's request."""
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


def _stop_and_restart(chaos: Chaos) -> None:
    assert chaos.service.end("replica0", signal.SIGTERM) == 0
    chaos.restart("replica0")


def _restart_redis(chaos: Chaos) -> None:
    chaos.redis.stop()
    chaos.redis.start()


def _kill_redis(chaos: Chaos) -> None:
    chaos.redis.kill()
    chaos.redis.start()


def _kill_api(chaos: Chaos) -> None:
    chaos.kill("api")
    chaos.service.start_api()


CASES: dict[str, Callable[[Chaos], None]] = {
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
        "| case | requests | lost | committed twice | second attempts | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
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
            offset = {"REPLICA_OFFSET": "2"} if name == "replica2" else {}
            service.start_replica(name, offset)
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
    CASES[case](chaos)

    def all_ended() -> bool:
        with contextlib.suppress(Exception):
            ours = [record for record in chaos.records() if record["id"] not in before]
            return len(ours) == REQUESTS and all(r.get("finished_at") for r in ours)
        return False

    wait_until(all_ended, END_S, f"{REQUESTS} requests to end")
    seconds = time.monotonic() - started
    records = {r["id"]: r for r in chaos.records() if r["id"] in ids}
    commits = chaos.commits()
    lost = [request_id for request_id in ids if records[request_id]["status"] != "succeeded"]
    twice = [request_id for request_id in ids if commits[request_id] > 1]
    again = sum(int(record["attempt"]) > 1 for record in records.values())
    table.append(f"| {case} | {REQUESTS} | {len(lost)} | {len(twice)} | {again} | {seconds:.1f} |")
    assert lost == []
    assert twice == []
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
