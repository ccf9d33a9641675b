"""What storing beside the next run buys: ``python -m scripts.lab.storing_bench``.

One replica of the bundled model in this process, over a Redis and a folder of its own. The same
requests run twice in each round, once with their files encoded and stored by other threads while
the next request runs, and once by the thread that ran them. What else the machine does falls on
both alike; the gain is the median of ratios inside a round.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from configs.parameters import Parameters
from configs.settings import REPOSITORY, Settings, load_settings
from configs.stage_config import EngineArgs, ReplicaPlan, RuntimeConfig, StageConfig
from routing.broker import Broker
from routing.claims import Claims
from routing.connection import connect
from routing.outputs import OutputStore
from routing.records import Records
from routing.replica import Heartbeat, Registry, ReplicaState
from routing.request import Priority, Submission
from scripts.serving_bench.measured_service import running_redis
from workers.engine.engine import Engine
from workers.outputs import OutputWriter
from workers.progress import Reporter, RunningRequest
from workers.runner import Runner

_MODEL: Final = REPOSITORY / "models" / "tiny"
_NAME, _BEGUN = "replica0", "0000000000001-0000"


class _FarStore(OutputStore):
    """A store that is so many seconds away."""

    def __init__(self, url: str, away_s: float) -> None:
        super().__init__(url)
        self._away_s = away_s

    def write(self, name: str, data: bytes) -> None:
        time.sleep(self._away_s)
        super().write(name, data)


def main() -> None:
    """Measure and print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20, help="in one run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=64, help="width and height, pixels")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 20])
    parser.add_argument(
        "--away-ms", type=float, nargs="+", default=[0.0, 20.0], help="of the store"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    stage = StageConfig(
        0, RuntimeConfig((0,)), EngineArgs(model=str(_MODEL), device=options.device)
    )
    engine = Engine.load(ReplicaPlan(_NAME, 0, stage, (0,)))
    engine.warm_up()
    rows = []
    with TemporaryDirectory(prefix="storing-bench-") as name, running_redis(Path(name)) as url:
        settings = replace(load_settings(), redis_url=url, outputs_url=f"file://{name}/outputs")
        for steps in options.steps:
            for away_ms in options.away_ms:
                asked = Parameters(
                    prompt="a red circle on a blue background",
                    seed=7,
                    width=options.size,
                    height=options.size,
                    num_inference_steps=steps,
                )
                pairs = [
                    [
                        _seconds(engine, settings, [asked] * options.requests, away_ms, beside)
                        for beside in (False, True)
                    ]
                    for _ in range(options.rounds)
                ]
                rows.append((steps, away_ms, pairs))
    print("| steps | store away | in turn | beside | throughput, beside : in turn |")
    print("|---|---|---|---|---|")
    for steps, away_ms, pairs in rows:
        in_turn, beside = (median(column) / options.requests for column in zip(*pairs, strict=True))
        ratios = [before / after for before, after in pairs]
        print(
            f"| {steps} | {away_ms:g} ms | {in_turn * 1000:.1f} ms | {beside * 1000:.1f} ms | "
            f"{median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}] |"
        )
    print(json.dumps([{"steps": row[0], "away_ms": row[1], "seconds": row[2]} for row in rows]))


def _seconds(
    engine: Engine, settings: Settings, asked: Sequence[Parameters], away_ms: float, beside: bool
) -> float:
    """Return what it takes until all requests are recorded as succeeded."""
    redis = connect(settings.redis_url)
    redis.flushdb()
    Registry(settings, redis).record(_heartbeat())
    records, claims = Records(settings, redis), Claims(settings, redis)
    for index, each in enumerate(asked):
        records.submit(Submission(f"req_{index}", 0, "tiny", each, Priority.NORMAL))
    runs: dict[str, RunningRequest] = {}
    runner = Runner(
        name=_NAME,
        incarnation=_BEGUN,
        engine=engine,
        claims=claims,
        writer=OutputWriter(_FarStore(settings.outputs_url, away_ms / 1000), metadata=True),
        broker=Broker(settings),
        reporter=Reporter(claims, records.get, runs),
        runs=runs,
        on_device_lost=sys.exit,
    )
    if not beside:
        runner.finish()  # what comes later is stored by the thread that made it
    begun = time.perf_counter()
    while runner.run_next() is not None:
        pass
    runner.finish()
    seconds = time.perf_counter() - begun
    assert all(records.get(f"req_{index}").outputs for index in range(len(asked)))
    return seconds


def _heartbeat() -> Heartbeat:
    return Heartbeat(
        name=_NAME,
        incarnation=_BEGUN,
        stage=0,
        model="tiny",
        state=ReplicaState.READY,
        node=f"{_NAME}@here",
        host="here",
        pid=1,
        devices=(0,),
        device_kind="cpu",
    )


if __name__ == "__main__":
    main()
