"""What routing by work buys on this machine: ``python -m scripts.routing_bench``.

For each policy it starts the whole service by ``scripts.serve``, on free ports and in a folder of
its own, submits a mix of requests at once and takes the time from the first submit to the last end.
The mix is half requests of N steps and half of 4 N, once in turns (the worst for round robin over
two replicas) and once shuffled, the same for both policies. Knows the service by its HTTP calls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from configs.settings import REPOSITORY
from scripts.redis_server import free_port

POLICIES: Final = ("round_robin", "least_work")
ORDERS: Final = ("in turns", "shuffled")
_READY_S: Final = 300.0


@dataclass(frozen=True)
class Round:
    """One mix: seconds from the first submit to the last end, and the steps of each replica."""

    order: str
    policy: str
    seconds: float
    steps: dict[str, int]


def main() -> None:
    """Measure and print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=24, help="in one mix")
    parser.add_argument("--steps", type=int, default=20, help="of a light one; a heavy one has 4 x")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = [
        measured
        for policy in POLICIES
        for measured in _rounds(policy, options.requests, options.steps, options.rounds)
    ]
    print("| order | round_robin | least_work | saved |", "| --- | --- | --- | --- |", sep="\n")
    for order in ORDERS:
        times = {
            policy: median(r.seconds for r in rounds if (r.order, r.policy) == (order, policy))
            for policy in POLICIES
        }
        saved = 1 - times["least_work"] / times["round_robin"]
        shown = " | ".join(f"{times[policy]:.1f} s" for policy in POLICIES)
        print(f"| {order} | {shown} | {saved:.0%} |")
    print(json.dumps([vars(r) for r in rounds]))


def _rounds(policy: str, count: int, light: int, rounds: int) -> Iterator[Round]:
    with _service(policy) as url:
        _mix(url, [light] * 4)  # warm, and so that the speed of each replica is known
        for number in range(rounds):
            for order in ORDERS:
                steps = [light * 4 if place % 2 == 0 else light for place in range(count)]
                if order == "shuffled":
                    random.Random(number).shuffle(steps)
                seconds, given = _mix(url, steps)
                yield Round(order, policy, seconds, given)


def _mix(url: str, steps: list[int]) -> tuple[float, dict[str, int]]:
    given: dict[str, int] = {}
    ids = []
    started = time.monotonic()
    for count in steps:
        body = {"prompt": "a red circle on a blue background", "num_inference_steps": count}
        request = _call(f"{url}/v1/requests", body)
        ids.append(request["id"])
        given[request["replica"]] = given.get(request["replica"], 0) + count
    for request_id in ids:
        ended: dict[str, Any] = {"status": "queued"}
        while ended["status"] in {"queued", "running"}:
            ended = _call(f"{url}/v1/requests/{request_id}")
        if ended["status"] != "succeeded":
            raise SystemExit(f"Error: {request_id} is {ended['status']}: {ended['error']}")
    return time.monotonic() - started, dict(sorted(given.items()))


@contextmanager
def _service(policy: str) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "console").open("wb") as console:
        environ = {
            **{name: value for name, value in os.environ.items() if name != "REDIS_URL"},
            "RUN_DIR": f"{folder}/run",
            "FLOWER_PORT": str(free_port()),
            "ROUTING_POLICY": policy,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.serve", "--port", str(port)],
            cwd=REPOSITORY,
            env=environ,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_ready(url, process, Path(folder) / "console")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], console: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            listed = _call(f"{url}/v1/replicas")["data"]
        except (OSError, urllib.error.URLError):
            listed = []
        if listed and all(replica["state"] == "ready" for replica in listed):
            _call(f"{url}/ready")
            return
        time.sleep(0.5)
    raise SystemExit(f"Error: the service did not become ready; it said:\n{console.read_text()}")


def _call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {
        "Content-Type": "application/json",
        "Prefer": "wait=50" if body is None else "wait=0",
    }
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - our own service
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.load(answer)


if __name__ == "__main__":
    main()
