"""What routing by work buys on this machine: ``python -m scripts.lab.routing_bench``.

Runs a service of its own (`scripts/serving_bench/measured_service.py`) and a second API before the
same replicas, so that there is one for each policy. Submits a mix of requests at once and takes the
time from the first submit to the last end. The mix is half requests of N steps and half of 4 N,
once in turns (the worst for round robin over two replicas) and once shuffled. Each round runs all
of it by both policies, so that what else the machine does falls on both alike; figures are medians,
the saving is that of ratios inside a round.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from configs.errors import ConfigurationError
from configs.settings import load_settings
from configs.stages import load_stages, plan_replicas
from scripts.api_client import ApiClient
from scripts.launcher.preflight import StartRefused
from scripts.serving_bench.measured_service import running_api, running_redis, running_service

POLICIES: Final = ("round_robin", "least_work")
ORDERS: Final = ("in turns", "shuffled")


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
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds, of a service")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    try:
        with _service(options.start_timeout) as apis:
            _mix(apis["round_robin"], [options.steps] * 4)  # warm, with speeds that are known
            measured = list(_rounds(apis, options.requests, options.steps, options.rounds))
    except (ConfigurationError, StartRefused) as refused:
        raise SystemExit(f"Error: {refused}") from None
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


def _rounds(apis: dict[str, ApiClient], count: int, light: int, rounds: int) -> Iterator[Measured]:
    for number in range(rounds):
        for order in ORDERS:
            steps = [light * 4 if place % 2 == 0 else light for place in range(count)]
            if order == "shuffled":
                random.Random(number).shuffle(steps)
            for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
                seconds, given = _mix(apis[policy], steps)
                yield Measured(number, order, policy, seconds, given)


def _mix(api: ApiClient, steps: list[int]) -> tuple[float, dict[str, int]]:
    given: dict[str, int] = {}
    ids = []
    started = time.monotonic()
    for count in steps:
        body = {"prompt": "a red circle on a blue background", "num_inference_steps": count}
        request = api.submit(body, secrets.token_hex(16))
        ids.append(request["id"])
        given[request["replica"]] = given.get(request["replica"], 0) + count
    for request_id in ids:
        ended: dict[str, Any] = {"status": "queued"}
        while ended["status"] in {"queued", "running"}:
            ended = api.request(request_id, wait_s=10)
        if ended["status"] != "succeeded":
            raise SystemExit(f"Error: {request_id} is {ended['status']}: {ended['error']}")
    return time.monotonic() - started, dict(sorted(given.items()))


@contextmanager
def _service(start_timeout_s: float) -> Iterator[dict[str, ApiClient]]:
    """Run everything; yields the API of each policy."""
    settings = load_settings()
    stage_file, key = settings.stage_configs_path, settings.api_key
    replicas = len(plan_replicas(load_stages(stage_file)))
    with TemporaryDirectory(prefix="diffusion-routing-") as folder, ExitStack() as stack:
        shared = {
            "REDIS_URL": stack.enter_context(running_redis(Path(folder))),
            "STAGE_CONFIGS_PATH": str(stage_file),
        }
        first, second = ({**shared, "ROUTING_POLICY": policy} for policy in POLICIES)
        urls = (
            stack.enter_context(running_service(stage_file, replicas, start_timeout_s, key, first)),
            stack.enter_context(running_api(replicas, start_timeout_s, key, second)),
        )
        yield {policy: ApiClient(url, key) for policy, url in zip(POLICIES, urls, strict=True)}


if __name__ == "__main__":
    main()
