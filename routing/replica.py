"""Replicas as others see them, and the registry that says which are alive."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from redis import Redis

from configs.errors import NotFound
from configs.parameters import Abilities
from configs.settings import Settings
from routing.keys import REPLICA, TOTALS, Keys, read_hash
from routing.lua import Scripts


class ReplicaState(StrEnum):
    """Where a replica stands; only ``ready`` ones are in the rotation."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    GONE = "gone"


class Command(StrEnum):
    """What an operator may command of a replica."""

    DRAIN = "drain"
    RESTART = "restart"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a replica says of itself, about once a second.

    Attributes:
        name: Its name, which is also the name of its queue.
        incarnation: One process of it; a later one sorts after an earlier one.
        node: Celery node name, to send it control commands.
        devices: Its device chunk, such as ``(2, 3)``.
        step_s: Seconds one denoising step takes, a moving mean; None before the first.
        memory_bytes: Memory its process holds.
        device_memory_bytes: Device memory it holds; None without such a device.
        stopping: Whether its process is about to end.
        error: Why it failed; kept through the next start, until it is ready.
        lasting: Whether its next start would fail as well, until a person changes something.
        activity: What it does while it loads, such as `downloading 14.2 of 57.7 GB`.
        downloaded_bytes: What is there of its model's files.
        download_bytes: The size of these files; None while nothing is downloaded.
    """

    name: str
    incarnation: str
    stage: int
    model: str
    state: ReplicaState
    node: str
    host: str
    pid: int
    devices: tuple[int, ...]
    device_kind: str
    capacity: int = 1
    started_at: float = 0.0
    step_s: float | None = None
    memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    stopping: bool = False
    error: str | None = None
    lasting: bool = False
    activity: str | None = None
    downloaded_bytes: int | None = None
    download_bytes: int | None = None

    @property
    def kept_s(self) -> float:
        """Seconds for which it is remembered after its last heartbeat."""
        return KEEP_LASTING_S if self.lasting else FORGET_AFTER_S


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as the registry shows it: its last heartbeat, its queue and its counters."""

    heartbeat: Heartbeat
    heartbeat_at: float
    waiting: int
    running: int
    completed: int
    failed: int
    restarts: int
    stolen: int

    @property
    def name(self) -> str:
        """Its name."""
        return self.heartbeat.name

    @property
    def state(self) -> ReplicaState:
        """Its state; ``gone`` once its heartbeat has expired."""
        return self.heartbeat.state


def heartbeat_fields(heartbeat: Heartbeat) -> dict[str, str]:
    """Return the fields of a heartbeat that the script which records it does not set itself."""
    fields = {
        name: json.dumps(value)
        for name, value in asdict(heartbeat).items()
        if name not in {"name", "incarnation", "stage", "state"} and (name != "error" or value)
    }
    return {**fields, "stopping": "1" if heartbeat.stopping else "0"}


def read_replica(
    stored: Mapping[str, str], expired: bool, waiting: int, running: int, totals: Mapping[str, str]
) -> Replica:
    """Read a replica as Redis holds it; an expired heartbeat makes it ``gone``."""
    values = read_hash(REPLICA, stored)
    values["state"] = ReplicaState.GONE if expired else ReplicaState(values["state"])
    values["devices"] = tuple(values["devices"])
    return Replica(
        heartbeat=Heartbeat(**values),
        heartbeat_at=float(stored["beat_at"]),
        waiting=waiting,
        running=running,
        **read_hash(TOTALS, totals),
    )


FORGET_AFTER_S = 3600.0
# Nobody starts it again, so that nothing else would say why there is none.
KEEP_LASTING_S = 7 * 86_400.0


_SHOWN: Final = 4


def not_ready(stage: int, model: str, replicas: Sequence[Replica]) -> str:
    """Return why a stage has no replica in the rotation: what each of them does, or why it failed.

    `replicas` may be those of all stages.
    """
    own = [
        replica
        for replica in replicas
        if replica.heartbeat.stage == stage and replica.heartbeat.model == model
    ]
    if not own:
        return f"no replica of {model!r} has been seen"
    shown = [f"{each.name} is {each.state}{_why(each)}" for each in own[:_SHOWN]]
    if len(own) > _SHOWN:
        shown.append(f"and {len(own) - _SHOWN} more")
    return f"no replica of {model!r} is ready: {', '.join(shown)}"


def _why(replica: Replica) -> str:
    heartbeat = replica.heartbeat
    living = replica.state is ReplicaState.LOADING
    told = [each for each in (heartbeat.activity if living else None, heartbeat.error) if each]
    return f" ({'; its last start failed: '.join(told)})" if told else ""


@dataclass(frozen=True, slots=True)
class DrainCommand:
    """An operator's command that a replica is to take nothing more.

    Attributes:
        told_at: Tells one command from the next; of a clock that is not the replica's.
        seconds: How long what runs may go on, from when the replica hears of it.
        ends: Whether its process is to end then, to be started again.
    """

    told_at: str
    seconds: float
    ends: bool


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """What a heartbeat is answered with.

    Attributes:
        state: The state that holds.
        waiting: Requests in its queue.
        unannounced: How many of these have no message in Celery's queue; while it has room, as many
            wake-ups got lost.
        elsewhere: Requests that it could take from the queues of others, its own being empty.
        superseded: Whether the name belongs to a newer process.
        drain: The operator's command, if there is one.
    """

    state: ReplicaState
    waiting: int
    unannounced: int = 0
    elsewhere: int = 0
    superseded: bool = False
    drain: DrainCommand | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model some replica has loaded: its stage, what it can do, and its other names."""

    name: str
    stage: int
    abilities: Abilities
    aliases: tuple[str, ...] = ()


class Registry:
    """Reads and writes the registry."""

    def __init__(
        self, settings: Settings, redis: Redis, clock: Callable[[], float] = time.time
    ) -> None:
        self._expiry_s = settings.heartbeat_expiry_s
        self._redis = redis
        self._keys = Keys(settings.redis_prefix)
        self._scripts = Scripts(redis, settings.redis_prefix)
        self._clock = clock
        self._models: tuple[Mapping[str, str], Mapping[str, LoadedModel]] = ({}, {})

    def record(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Record a heartbeat.

        A failed replica keeps its place on the list for an hour, so that its reason can be read
        though its process has ended; one that nobody starts again, for a week.
        """
        now = self._clock()
        failed = heartbeat.state is ReplicaState.FAILED
        expires_at = now + (heartbeat.kept_s if failed else self._expiry_s)
        answer = self._scripts.call(
            "heartbeat",
            heartbeat.name,
            heartbeat.incarnation,
            heartbeat.stage,
            heartbeat.state,
            now,
            expires_at,
            fields=heartbeat_fields(heartbeat),
        )
        if answer[0] == "superseded":
            return HeartbeatAnswer(ReplicaState.GONE, 0, superseded=True)
        state, waiting, unannounced, told_at, seconds, ends, elsewhere = answer
        return HeartbeatAnswer(
            state=ReplicaState(state),
            waiting=int(waiting),
            unannounced=int(unannounced),
            elsewhere=int(elsewhere),
            drain=DrainCommand(told_at, float(seconds), ends == "1") if told_at else None,
        )

    def publish_model(self, model: LoadedModel) -> None:
        """Publish what a loaded model can do, for the checks of the API."""
        value = {
            "stage": model.stage,
            "abilities": model.abilities.to_json(),
            "aliases": model.aliases,
        }
        self._redis.hset(self._keys.models(), model.name, json.dumps(value))

    def models(self) -> Mapping[str, LoadedModel]:
        """Return every model some replica has loaded, by name."""
        raw: Mapping[str, str] = self._redis.hgetall(self._keys.models())  # type: ignore[assignment]
        known, models = self._models
        if raw == known:  # each submit asks, and they change when a replica has loaded
            return models
        found = {name: json.loads(value) for name, value in sorted(raw.items())}
        models = {
            name: LoadedModel(
                name,
                value["stage"],
                Abilities.from_json(value["abilities"]),
                tuple(value.get("aliases", ())),
            )
            for name, value in found.items()
        }
        self._models = (raw, models)
        return models

    def command(self, name: str, command: Command, drain_s: float = 0.0) -> str:
        """Record an operator's command; what runs on the replica may take ``drain_s`` more.

        Returns:
            ``done``, ``unknown``, or the state in which a replica has no process to restart.
        """
        answer: str = self._scripts.call("command", name, command, self._clock(), drain_s)
        return answer

    def names(self) -> list[str]:
        """Return all known names, living or not, in the order of their numbers."""
        names: list[str] = self._redis.zrange(self._keys.replicas(), 0, -1)  # type: ignore[assignment]
        return sorted(names, key=_by_number)

    def get(self, name: str) -> Replica | None:
        """Return one replica, or None for an unknown name."""
        return self._read([name]).get(name)

    def find(self, name: str) -> Replica:
        """Return one replica.

        Raises:
            NotFound: There is no such replica.
        """
        replica = self.get(name)
        if replica is None:
            raise unknown_replica(name, self.names())
        return replica

    def all(self) -> list[Replica]:
        """Return all replicas seen within the last hour, in the order of their numbers."""
        names = self.names()
        found = self._read(names)
        return [found[name] for name in names if name in found]

    def forget(self, name: str) -> None:
        """Remove a replica that is gone for good."""
        keys = self._keys
        pipeline = self._redis.pipeline()
        pipeline.zrem(keys.replicas(), name)
        pipeline.delete(keys.replica(name), keys.totals(name))
        pipeline.srem(keys.drained(), name)
        pipeline.execute()

    def _read(self, names: list[str]) -> dict[str, Replica]:
        keys = self._keys
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(keys.replica(name))
            pipeline.zscore(keys.replicas(), name)
            pipeline.zcard(keys.waiting(name))
            pipeline.scard(keys.running(name))
            pipeline.hgetall(keys.totals(name))
        answers: list[Any] = pipeline.execute() if names else []
        now = self._clock()
        replicas = {}
        for place, name in enumerate(names):
            stored, expires_at, waiting, running, totals = answers[place * 5 : place * 5 + 5]
            if stored and expires_at is not None:
                replicas[name] = read_replica(stored, expires_at <= now, waiting, running, totals)
        return replicas


def _by_number(name: str) -> tuple[int, str]:
    digits = name[len(name.rstrip("0123456789")) :]
    return (int(digits) if digits else 0, name)


def unknown_replica(name: str, known: list[str]) -> NotFound:
    """Return the error for a name that no replica has."""
    return NotFound(
        f"There is no replica {name!r}; use one of {', '.join(known)}."
        if known
        else f"There is no replica {name!r}: none has started within the last hour.",
        param="name",
    )
