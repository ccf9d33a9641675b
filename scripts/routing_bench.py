"""What routing by work buys on this machine: ``python -m scripts.routing_bench``.

Starts the whole service by ``scripts.serve`` on free ports, over a Redis and a folder of its own,
and a second API before the same replicas, so that there is one for each policy. Submits a mix of
requests at once and takes the time from the first submit to the last end. The mix is half requests
of N steps and half of 4 N, once in turns (the worst for round robin over two replicas) and once
shuffled. Each round runs all of it by both policies, so that what else the machine does falls on
both alike; figures are medians, the saving is that of ratios inside a round. Knows the service by
its HTTP calls only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from configs.settings import REPOSITORY
from scripts.door import Door, NoAnswer, Refused
from scripts.redis_server import free_port, plan_redis

POLICIES: Final = ("round_robin", "least_work")
ORDERS: Final = ("in turns", "shuffled")
_READY_S: Final = 300.0


@dataclass(frozen=True)
class Measured:
    """One mix: seconds from the first submit to the last end, and the steps of each replica."""

    round: int
    order: str
    policy: str
    seconds: float
    steps: dict[str, int]


def main() -> None:
    """Measure and print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=16, help="in one mix")
    parser.add_argument("--steps", type=int, default=20, help="of a light one; a heavy one has 4 x")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    with _service() as doors:
        _mix(doors["round_robin"], [options.steps] * 4)  # warm, and the replicas' speeds are known
        measured = list(_rounds(doors, options.requests, options.steps, options.rounds))
    for line in _table(measured, options.rounds):
        print(line)
    print(json.dumps([vars(mix) for mix in measured]))


def _table(measured: list[Measured], rounds: int) -> Iterator[str]:
    yield "| order | policy | seconds | steps of the busier replica | saved |"
    yield "| --- | --- | --- | --- | --- |"
    for order in ORDERS:
        seconds = {(m.round, m.policy): m.seconds for m in measured if m.order == order}
        saved = [
            1 - seconds[number, "least_work"] / seconds[number, "round_robin"]
            for number in range(rounds)
        ]
        for policy in POLICIES:
            mixes = [m for m in measured if (m.order, m.policy) == (order, policy)]
            took = sorted(mix.seconds for mix in mixes)
            most = sorted(max(mix.steps.values()) for mix in mixes)
            shown = f"{median(took):.1f} [{took[0]:.1f}-{took[-1]:.1f}]"
            ratio = f"{median(saved):.0%} [{min(saved):.0%} to {max(saved):.0%}]"
            by = ratio if policy == "least_work" else ""
            yield f"| {order} | `{policy}` | {shown} | {most[0]} to {most[-1]} | {by} |"


def _rounds(doors: dict[str, Door], count: int, light: int, rounds: int) -> Iterator[Measured]:
    for number in range(rounds):
        for order in ORDERS:
            steps = [light * 4 if place % 2 == 0 else light for place in range(count)]
            if order == "shuffled":
                random.Random(number).shuffle(steps)
            for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
                seconds, given = _mix(doors[policy], steps)
                yield Measured(number, order, policy, seconds, given)


def _mix(door: Door, steps: list[int]) -> tuple[float, dict[str, int]]:
    given: dict[str, int] = {}
    ids = []
    started = time.monotonic()
    for count in steps:
        body = {"prompt": "a red circle on a blue background", "num_inference_steps": count}
        request = door.submit(body, secrets.token_hex(16))
        ids.append(request["id"])
        given[request["replica"]] = given.get(request["replica"], 0) + count
    for request_id in ids:
        ended: dict[str, Any] = {"status": "queued"}
        while ended["status"] in {"queued", "running"}:
            ended = door.request(request_id, wait_s=10)
        if ended["status"] != "succeeded":
            raise SystemExit(f"Error: {request_id} is {ended['status']}: {ended['error']}")
    return time.monotonic() - started, dict(sorted(given.items()))


@contextmanager
def _service() -> Iterator[dict[str, Door]]:
    """Run everything; yields the API of each policy."""
    ports = {policy: free_port() for policy in POLICIES}
    doors = {policy: Door(f"http://127.0.0.1:{port}") for policy, port in ports.items()}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        redis = plan_redis(Path(folder) / "redis")
        environ = {
            **os.environ,
            "REDIS_URL": redis.url,
            "RUN_DIR": f"{folder}/run",
            "FLOWER_PORT": str(free_port()),
        }
        log = stack.enter_context((Path(folder) / "log").open("wb"))

        def run(command: Sequence[str], **own: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env={**environ, **own}, stdout=log, stderr=log
            )
            stack.callback(_end, process)
            return process

        server = run(redis.command)
        _wait_until(lambda: redis.ready(server.pid) is not None, server, Path(folder) / "log")
        serve = ("-m", "scripts.serve", "--port", str(ports["round_robin"]))
        first = run((sys.executable, *serve), ROUTING_POLICY="round_robin")
        second = run(
            (sys.executable, "-m", "gunicorn", "--config", "python:api.gunicorn_conf"),
            ROUTING_POLICY="least_work",
            API_PORT=str(ports["least_work"]),
        )
        for door, process in zip(doors.values(), (first, second), strict=True):
            _wait_until(lambda door=door: _is_ready(door), process, Path(folder) / "log")  # type: ignore[misc]
        yield doors


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


def _is_ready(door: Door) -> bool:
    try:
        listed = door.replicas()
    except (NoAnswer, Refused):
        return False
    return bool(listed) and all(replica["state"] == "ready" for replica in listed)


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit(
                f"Error: the service did not become ready; it said:\n{log.read_text()}"
            )
        time.sleep(0.5)


if __name__ == "__main__":
    main()
