"""A small world for the routing tests: a router over real Redis, replicas, a clock by hand."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field

from redis import Redis

from configs.parameters import Parameters
from configs.settings import Settings
from routing.broker import Broker
from routing.claims import Claims, MustRunAlone
from routing.failover import Sweep
from routing.outbox import Outbox
from routing.outputs import OrphanedOutputs, OutputStore
from routing.records import Records
from routing.replica import Heartbeat, HeartbeatAnswer, Registry, ReplicaState
from routing.request import Outcome, Output, Priority, Request, Status, Submission
from routing.router import LostSubmits, Router

STAGE = 0
MODEL = "tiny"
SUCCESS = Outcome(
    Status.SUCCEEDED, (Output("a/1-0.png", "image/png", 64, 64, 1, 10, "00"),), step=4, steps=4
)


@dataclass
class Clock:
    """Seconds since the epoch, moved by hand."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class World:
    """One service without processes: everything that an API or a replica would call."""

    settings: Settings
    redis: Redis
    clock: Clock = field(default_factory=Clock)
    capacity: int = 1

    def __post_init__(self) -> None:
        own = (self.settings, self.redis, self.clock)
        self.records, self.claims = Records(*own), Claims(*own)
        self.registry, self.outbox = Registry(*own), Outbox(*own)
        self.orphans = OrphanedOutputs(*own)
        self.outputs = OutputStore(self.settings.outputs_url)
        self.broker, self.lost = Broker(self.settings), LostSubmits(self.clock)
        self.router = Router(self.settings, self.redis, self.broker, self.clock, self.lost)
        self.incarnations: dict[str, str] = {}
        self._serial = itertools.count(1)
        self.sweep = Sweep(self.settings, self.redis, self.router, self.broker, self.clock)

    def start(self, name: str, state: ReplicaState = ReplicaState.READY, stage: int = STAGE) -> str:
        """Start a replica anew: a new incarnation that beats once."""
        self.incarnations[name] = f"{int(self.clock.now * 1000):013d}-{next(self._serial):04d}"
        self.beat(name, state, stage)
        return self.incarnations[name]

    def beat(
        self,
        name: str,
        state: ReplicaState = ReplicaState.READY,
        stage: int = STAGE,
        step_s: float | None = None,
    ) -> ReplicaState:
        return self.standing(name, state, stage, step_s).state

    def standing(
        self,
        name: str,
        state: ReplicaState = ReplicaState.READY,
        stage: int = STAGE,
        step_s: float | None = None,
    ) -> HeartbeatAnswer:
        """Have a replica beat; return what it is answered."""
        heartbeat = Heartbeat(
            name=name,
            incarnation=self.incarnations[name],
            stage=stage,
            model=MODEL,
            state=state,
            node=f"{name}@nowhere",
            host="nowhere",
            pid=1,
            devices=(0,),
            device_kind="cpu",
            step_s=step_s,
            capacity=self.capacity,
        )
        return self.registry.record(heartbeat)

    def submission(self, **changes: object) -> Submission:
        values: dict[str, object] = {
            "id": f"req_{secrets.token_hex(6)}",
            "stage": STAGE,
            "model": MODEL,
            "parameters": parameters(),
            "priority": Priority.NORMAL,
        }
        return Submission(**{**values, **changes})  # type: ignore[arg-type]

    def submit(self, **changes: object) -> Request:
        self.clock.forward(0.001)
        return self.records.submit(self.submission(**changes))[0]

    def claim(self, name: str) -> Request | None:
        try:
            claim = self.claims.claim(name, self.incarnations[name])
        except MustRunAlone:
            return None
        return claim.request if claim is not None else None

    def run(self, name: str, seconds: float) -> Request:
        """Have a replica run the next of its line to a success, in so many seconds."""
        claimed = self.claim(name)
        assert claimed is not None
        self.clock.forward(seconds)
        self.beat(name)
        assert self.claims.finish(claimed, SUCCESS)
        return claimed

    def place(self, request_id: str) -> int | None:
        return self.records.queue_position(self.get(request_id))

    def get(self, request_id: str) -> Request:
        return self.records.get(request_id)


def parameters(**changes: object) -> Parameters:
    values: dict[str, object] = {
        "prompt": "a red circle",
        "seed": 1,
        "width": 64,
        "height": 64,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
    }
    return Parameters(**{**values, **changes})  # type: ignore[arg-type]
