"""Many requests through one service: the memory of API, replicas and Redis stays where it was.

``SOAK_REQUESTS`` says how many; ``make soak`` runs the long form and prints the slopes that
docs/reliability.md shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis

from configs.settings import REPOSITORY
from tests.e2e.service import Service
from tests.redis_server import RedisServer, running_redis
from tests.waiting import wait_until

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "60"))
REPLICAS = ("replica0", "replica1") if "SOAK_REQUESTS" in os.environ else ("replica0",)
AT_ONCE = 6
WARM_UP = 0.4  # share of the requests after which memory is to be flat
ALLOWED = 8 << 20  # bytes that a process may have gained by the end: what allocators keep
PER_REQUEST = 4_000  # and for each request: a third of one of its pictures
_MANY_CHANGES = 10_200
_EMBEDDINGS = 500_000  # bytes, of forty prompts


@pytest.fixture
def redis(redis_binary: str, tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(redis_binary, tmp_path) as server:
        yield server


@pytest.fixture
def service(redis: RedisServer, tmp_path: Path) -> Iterator[Service]:
    """One whose records go soon after their end, so that what stays is what leaks.

    For the same reason the embeddings of prompts, each of which is new, fill their cache early.
    """
    stage = tmp_path / "stage.yaml"
    text = (REPOSITORY / "configs" / "tiny_cpu.yaml").read_text()
    text = text.replace("./models/tiny", str(REPOSITORY / "models" / "tiny"))
    seqs = "      max_num_seqs: 1\n"
    stage.write_text(text.replace(seqs, f"{seqs}      prompt_embed_cache_bytes: {_EMBEDDINGS}\n"))
    running = Service(redis.url, "soak:", tmp_path, stage, environ={"RETENTION_S": "2"})
    with Redis(port=redis.port) as client:
        # As full as it ever gets, so that its growth to there is not taken for a leak.
        pipeline = client.pipeline(transaction=False)
        entry: Any = {"event": "queued", "id": "-", "status": "queued", "attempt": "1"}
        for _ in range(_MANY_CHANGES):
            pipeline.xadd("soak:changes", {**entry, "replica": "replica0"})
        pipeline.execute()
    try:
        running.start(*REPLICAS)
        yield running
    finally:
        running.stop()


def _one(service: Service, number: int) -> None:
    """Everything a client does in the life of a request; every tenth is canceled."""
    body = {
        "prompt": f"a red circle, number {number}",
        "num_inference_steps": 3 + number % 5,
        "width": 64 if number % 3 else 32,
        "affinity_key": f"user-{number % 7}" if number % 2 else None,
    }
    key = {"Idempotency-Key": f"soak-{number}"}
    answer = service.call("POST", "/v1/requests", body, key)
    assert answer.status == 202, answer.content
    if number % 10 == 0:
        service.call("POST", f"/v1/requests/{answer.json['id']}/cancel")
    ended = service.ended(answer.json["id"])
    assert ended["status"] in {"succeeded", "canceled"}, ended
    if ended["status"] == "succeeded":
        service.call("GET", ended["outputs"][0]["url"])
    assert service.call("GET", "/v1/requests?status=succeeded&limit=5").status == 200


def _memory(service: Service, redis: RedisServer) -> dict[str, int]:
    """Bytes of each part: resident ones of the processes, Redis by its own account.

    Not the unique ones: those of a forked process jump when its first full collection touches
    every page that it had shared.
    """
    parts = {}
    for name in REPLICAS:
        parts[name] = psutil.Process(service.processes[name].pid).memory_info().rss
    for number, child in enumerate(psutil.Process(service.processes["api"].pid).children()):
        parts[f"api process {number}"] = child.memory_info().rss
    with Redis(port=redis.port) as client:
        info: Any = client.info("memory")
        parts["redis"] = int(info["used_memory"])
    return parts


def _slope(samples: list[tuple[int, int]]) -> float:
    """Bytes for each request, by least squares."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread


@pytest.mark.slow
def test_memory_is_flat_after_the_warm_up(service: Service, redis: RedisServer) -> None:
    samples: list[tuple[int, dict[str, int]]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, REQUESTS, AT_ONCE):
            batch = range(start, min(start + AT_ONCE, REQUESTS))
            list(pool.map(lambda number: _one(service, number), batch))
            samples.append((batch.stop, _memory(service, redis)))
    measured = [(count, parts) for count, parts in samples if count >= REQUESTS * WARM_UP]
    requests = measured[-1][0] - measured[0][0]
    rows = [
        f"| part | MiB after {measured[0][0]} | MiB after {measured[-1][0]} | bytes a request |",
        "| --- | --- | --- | --- |",
    ]
    grown = {}
    for name in measured[0][1]:
        line = [(count, parts[name]) for count, parts in measured]
        slope = _slope(line)
        first, last = line[0][1] / 2**20, line[-1][1] / 2**20
        rows.append(f"| {name} | {first:.1f} | {last:.1f} | {slope:+.0f} |")
        grown[name] = slope * requests
    print("", *rows, sep="\n")  # noqa: T201 - the table is the result
    allowed = ALLOWED + PER_REQUEST * requests
    assert {name: by for name, by in grown.items() if by > allowed} == {}
    wait_until(lambda: _left(redis) == [], 30, "every key of a request to be gone")


def _left(redis: RedisServer) -> list[str]:
    with Redis(port=redis.port, decode_responses=True) as client:
        patterns = ("soak:request*", "soak:idempotency*", "soak:finished", "soak:replica:*:work")
        return [key for pattern in patterns for key in client.scan_iter(pattern, count=1000)]
