"""What the ways of routing buy on this machine: ``python -m scripts.lab.routing_bench``.

Runs services of its own (`scripts/serving_bench/measured_service.py`). Submits a mix of requests at
once and takes the time from the first submit to the last end. Each round runs all of it both ways,
so that what else the machine does falls on both alike; figures are medians, the saving is that of
ratios inside a round.

- ``--mix cost``: half of the requests have N steps and half 4 N, once in turns and once shuffled;
  by turns against by work, a second API before the same replicas.
- ``--mix sizes``: two sizes in turns, on one replica of four slots; a slot goes to the first that
  waits (``MAX_OVERTAKEN=0``) against the first that shares steps.
"""

from __future__ import annotations

import argparse
import json
import math
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

import yaml

from configs.errors import ConfigurationError
from configs.settings import REPOSITORY, load_settings
from configs.stages import load_stages, plan_replicas
from scripts.api_client import ApiClient
from scripts.launcher.preflight import StartRefused
from scripts.serving_bench.measured_service import running_api, running_redis, running_service

POLICIES: Final = ("round_robin", "least_work")
ORDERS: Final = ("in turns", "shuffled")
SLOTS: Final = {"first come": {"MAX_OVERTAKEN": "0"}, "shared steps": {}}
WIDTHS: Final = (64, 96)


@dataclass(frozen=True)
class Measured:
    """One mix: seconds from the first submit to the last end, and the steps of each replica.

    Attributes:
        policy: The way of routing that it was run by.
        p95_s: Seconds from submit to end that 95 % of the requests took at most.
    """

    round: int
    order: str
    policy: str
    seconds: float
    steps: dict[str, int]
    p95_s: float


def main() -> None:
    """Measure and print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mix", choices=("cost", "sizes"), default="cost")
    parser.add_argument("--requests", type=int, default=16, help="in one mix")
    parser.add_argument("--steps", type=int, default=20, help="of a light one; a heavy one has 4 x")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds, of a service")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    try:
        if options.mix == "cost":
            with _service(options.start_timeout) as apis:
                _mix(apis["round_robin"], _costs(4, options.steps))  # warm, with known speeds
                measured = list(_rounds(apis, options.requests, options.steps, options.rounds))
        else:
            with _services_of_slots(options.start_timeout) as apis:
                measured = list(_sized(apis, options.requests, options.steps, options.rounds))
    except (ConfigurationError, StartRefused) as refused:
        raise SystemExit(f"Error: {refused}") from None
    for line in _table(measured, options.rounds, *apis):
        print(line)
    print(json.dumps([vars(mix) for mix in measured]))


def _table(measured: list[Measured], rounds: int, usual: str, other: str) -> Iterator[str]:
    yield "| order | policy | seconds | steps of the busier replica | p95, s | saved |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for order in sorted({m.order for m in measured}):
        seconds = {(m.round, m.policy): m.seconds for m in measured if m.order == order}
        saved = [1 - seconds[number, other] / seconds[number, usual] for number in range(rounds)]
        for policy in (usual, other):
            mixes = [m for m in measured if (m.order, m.policy) == (order, policy)]
            took = sorted(mix.seconds for mix in mixes)
            most = sorted(max(mix.steps.values()) for mix in mixes)
            shown = f"{median(took):.1f} [{took[0]:.1f}-{took[-1]:.1f}]"
            ratio = f"{median(saved):.0%} [{min(saved):.0%} to {max(saved):.0%}]"
            by = ratio if policy == other else ""
            p95 = f"{median(mix.p95_s for mix in mixes):.1f}"
            yield f"| {order} | `{policy}` | {shown} | {most[0]} to {most[-1]} | {p95} | {by} |"


def _rounds(apis: dict[str, ApiClient], count: int, light: int, rounds: int) -> Iterator[Measured]:
    for number in range(rounds):
        for order in ORDERS:
            bodies = _costs(count, light)
            if order == "shuffled":
                random.Random(number).shuffle(bodies)
            for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
                yield Measured(number, order, policy, *_mix(apis[policy], bodies))


def _sized(apis: dict[str, ApiClient], count: int, steps: int, rounds: int) -> Iterator[Measured]:
    bodies = [
        {"width": WIDTHS[place % len(WIDTHS)], "num_inference_steps": steps}
        for place in range(count)
    ]
    for api in apis.values():  # warm: the first shared forward of each size checks itself
        _mix(api, bodies)
    for number in range(rounds):
        for way in apis if number % 2 == 0 else reversed(apis):
            yield Measured(number, "two sizes in turns", way, *_mix(apis[way], bodies))


def _costs(count: int, light: int) -> list[dict[str, int]]:
    return [
        {"num_inference_steps": light * 4 if place % 2 == 0 else light} for place in range(count)
    ]


def _mix(api: ApiClient, bodies: list[dict[str, int]]) -> tuple[float, dict[str, int], float]:
    """Return the seconds it took, the steps that each replica ran, and the p95 of all requests."""
    ran: dict[str, int] = {}
    took = []
    started = time.monotonic()
    usual = {"prompt": "a red circle on a blue background"}
    ids = [api.submit({**usual, **body}, secrets.token_hex(16))["id"] for body in bodies]
    for request_id, body in zip(ids, bodies, strict=True):
        ended: dict[str, Any] = {"status": "queued"}
        while ended["status"] in {"queued", "running"}:
            ended = api.request(request_id, wait_s=10)
        if ended["status"] != "succeeded":
            raise SystemExit(f"Error: {request_id} is {ended['status']}: {ended['error']}")
        steps = body["num_inference_steps"]
        ran[ended["replica"]] = ran.get(ended["replica"], 0) + steps
        took.append(ended["timings"]["total_s"])
    p95_s = sorted(took)[max(0, math.ceil(0.95 * len(took)) - 1)]
    return time.monotonic() - started, dict(sorted(ran.items())), p95_s


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


@contextmanager
def _services_of_slots(start_timeout_s: float) -> Iterator[dict[str, ApiClient]]:
    """Run one service for each way of filling slots, one replica of four slots each."""
    settings = load_settings()
    document = yaml.safe_load(settings.stage_configs_path.read_text())
    stage = document["stages"][0]
    stage["runtime"] |= {"devices": "0", "num_replicas": 1}
    stage["engine_args"] |= {"max_num_seqs": 4}
    model = Path(stage["engine_args"]["model"])
    if (REPOSITORY / model).is_dir():
        stage["engine_args"]["model"] = str(REPOSITORY / model)
    with TemporaryDirectory(prefix="diffusion-routing-") as name, ExitStack() as stack:
        stage_file = Path(name) / "stage.yaml"
        stage_file.write_text(yaml.safe_dump({"stages": [stage]}))
        apis = {}
        for number, (way, environ) in enumerate(SLOTS.items()):
            folder = Path(name) / str(number)
            folder.mkdir()
            own = {"REDIS_URL": stack.enter_context(running_redis(folder)), **environ}
            url = running_service(stage_file, 1, start_timeout_s, settings.api_key, own)
            apis[way] = ApiClient(stack.enter_context(url), settings.api_key)
        yield apis


if __name__ == "__main__":
    main()
