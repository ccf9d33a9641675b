"""Requests that kill their replica's process: they fail, after so many attempts, and nobody else.

A killed replica is started again at once, as the launcher does it (test_supervisor.py), and meets
the next attempt. The short form runs with the other tests; ``make chaos`` runs the long one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from configs.settings import REPOSITORY
from tests.e2e.service import Service
from tests.waiting import wait_until

LONG_FORM = "CHAOS_REQUESTS" in os.environ
# With one attempt innocents would be the first to fail, if a crash in company ended anybody.
INNOCENTS, ATTEMPTS = (58, 3) if LONG_FORM else (22, 1)
POISONS = 2
END_S = 400.0
REPLICAS = ("replica0", "replica1")
KILLED = {"PYTHONPATH": str(REPOSITORY / "tests" / "faults"), "FAULTS": "72:kill"}


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """Two replicas of four requests at a time, killed by any output 72 pixels wide."""
    stage = tmp_path / "stage.yaml"
    text = (REPOSITORY / "configs" / "tiny_cpu.yaml").read_text()
    text = text.replace("./models/tiny", str(REPOSITORY / "models" / "tiny"))
    stage.write_text(text.replace("max_num_seqs: 1", "max_num_seqs: 4"))
    environ = {"MAX_ATTEMPTS": str(ATTEMPTS)}
    service = Service(redis_url, f"{tmp_path.name}:", tmp_path, stage, environ)
    try:
        for name in REPLICAS:
            service.start_replica(name, KILLED)
        service.start()
        for name in REPLICAS:
            service.wait_for(name, "ready")
        yield service
    finally:
        service.stop()


def _revived(service: Service) -> int:
    """Start again what was killed; return how many that were."""
    killed = [name for name in REPLICAS if service.processes[name].poll() == -signal.SIGKILL]
    for name in killed:
        service.start_replica(name, KILLED)
    return len(killed)


@pytest.mark.slow
def test_two_poison_requests_fail_and_no_innocent_is_blamed(service: Service) -> None:
    # In the short form in turn with an innocent, so that one replica has both at the same time.
    first = INNOCENTS // 4
    poison_at = {first, INNOCENTS // 2 if LONG_FORM else first + 1}
    innocents, poisons = [], []
    for number in range(INNOCENTS):
        if number in poison_at:
            poisons.append(service.submit(width=72)["id"])
        innocents.append(service.submit(seed=7)["id"])
    assert len(poisons) == POISONS
    deaths = 0

    def ended(request_id: str) -> bool:
        nonlocal deaths
        deaths += _revived(service)
        return service.get(request_id)["status"] not in {"queued", "running"}

    for request_id in (*innocents, *poisons):
        wait_until(lambda i=request_id: ended(i), END_S, f"{request_id} to end")  # type: ignore[misc]
    with Redis.from_url(service.redis_url, decode_responses=True) as redis:
        crashes = {
            each: int(redis.hget(f"{service.redis_prefix}request:{each}", "crashes") or 0)
            for each in (*innocents, *poisons)
        }
    for request_id in poisons:
        request = service.get(request_id)
        assert (request["status"], request["error"]["code"]) == ("failed", "replica_crashed")
        assert f"this request, {crashes[request_id]} time" in request["error"]["message"]
        # Its first may have been one in company, which ends nobody.
        assert crashes[request_id] in {ATTEMPTS, max(ATTEMPTS, 2)}
        assert request["outputs"] == []
    assert {service.get(each)["status"] for each in innocents} == {"succeeded"}
    assert deaths > 0
    # Whoever shared the first crash was in one; from then on it ran alone, and in no other.
    assert max(crashes[each] for each in innocents) <= 1
