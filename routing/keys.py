"""The data model in Redis: every key, and every field of the hashes, in one table each.

Python and the Lua scripts build their names from these tables, and no other file spells a key. One
Redis, with or without replicas of its own: Redis Cluster is not supported, since one script touches
several keys. Celery keeps its own keys under the same prefix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple


@dataclass(frozen=True, slots=True)
class Key:
    """One kind of key; `Keys` has a function of its name that returns a key.

    Attributes:
        pattern: The key after the prefix, with {} for each part that tells its keys apart.
        kind: Its type in Redis.
        holds: What it is for.
        lifetime: When it goes.
    """

    pattern: str
    kind: str
    holds: str
    lifetime: str

    def __get__(self, keys: Keys, owner: type) -> Callable[..., str]:
        return f"{keys.prefix}{self.pattern}".format


@dataclass(frozen=True)
class Keys:
    """Keys under one prefix."""

    prefix: str

    request = Key("request:{}", "hash", "the record of an id", "RETENTION_S after its end")
    preview = Key(
        "request:{}:preview", "string", "newest preview, base64 of a JPEG", "its end, or an hour"
    )
    requests = Key("requests", "zset", "id by creation time", "with the record")
    by_status = Key("requests:{}", "zset", "the same for a status", "with the record")
    by_model = Key("requests:any:{}", "zset", "the same for a model", "with the record")
    by_kind = Key("requests:kind:{}", "zset", "the same for images or videos", "with the record")
    by_status_and_model = Key("requests:{}:{}", "zset", "the same for both", "with the record")
    finished = Key("finished", "zset", "id by the time of its end", "with the record")
    idempotency = Key("idempotency:{}", "string", '"fingerprint id" of a key', "with the record")
    deadlines = Key("deadlines", "zset", "waiting id by its start_by", "until it starts")
    deliveries = Key(
        "deliveries", "zset", '"id event", webhooks by the time they are due', "until settled"
    )
    replica = Key(
        "replica:{}", "hash", "last heartbeat and command of a name", "an hour after the last"
    )
    waiting = Key("replica:{}:waiting", "zset", "queued id by its score", "while not empty")
    work = Key("replica:{}:work", "string", "work of all that waits there", "with the queue")
    running = Key("replica:{}:running", "set", "ids that it has claimed", "while not empty")
    totals = Key("replica:{}:totals", "hash", "its counters", "with the replica")
    replicas = Key("replicas", "zset", "name by the expiry of its heartbeat", "with the replica")
    drained = Key("drained", "set", "names out of the rotation by hand", "until resumed")
    ready = Key("stage:{}:ready", "zset", "names in the rotation by expiry", "kept")
    spare = Key(
        "stage:{}:waiting",
        "zset",
        "queued id that any replica may take, by score",
        "while not empty",
    )
    held = Key(
        "stage:{}:held", "zset", "queued id by when its affinity key lets go", "while not empty"
    )
    clients = Key(
        "stage:{}:clients", "zset", "client by when its next request counts as sent", "while ahead"
    )
    turn = Key("stage:{}:turn", "string", "round-robin counter", "kept")
    models = Key("models", "hash", "model name to its stage and abilities", "kept")
    orphaned = Key(
        "loose",
        "zset",
        "id whose files may have no record, by the time it was noted",
        "until recorded, or its files are gone; some more than an hour",
    )
    changes = Key("changes", "stream", "one entry for each change of a record", "newest 10 000")
    sweep = Key("sweep", "string", "lock of the failover sweep", "30 seconds")
    queue = Key("{}", "list", "messages of a Celery queue, which Celery writes", "until taken")


class Field(NamedTuple):
    """One field of a hash.

    Attributes:
        name: In Redis, and in the dataclass that it is read into.
        written_by: Scripts, or calls of routing.
        read_by: The same; `clients` where an answer of the API shows it.
        parse: Reads its text for the dataclass; None for a field that only scripts read.
        absent: Text of a field that is not set; None where it always is.
    """

    name: str
    written_by: str
    read_by: str
    parse: Callable[[str], Any] | None = None
    absent: str | None = None


def _number(text: str) -> float | None:
    return float(text) if text else None


def _flag(text: str) -> bool:
    return text == "1"


RECORD: Final = (
    Field("id", "submit", "clients", str),
    Field("stage", "submit", "requeue", int),
    Field("model", "submit", "lists, clients", str),
    Field("parameters", "submit, edit", "replica, clients", json.loads),
    Field("kind", "submit, edit", "lists"),
    Field("work", "submit, edit", "choice of a replica"),
    Field("status", "submit, claim, requeue, finish", "every script, clients", str),
    Field("replica", "submit, requeue, claim", "every script, clients", str),
    Field("attempt", "submit, requeue", "fences of a claim, clients", int),
    Field("crashes", "submit, requeue", "claim, clients", int),
    Field("crashed_beside", "claim, requeue", "requeue"),
    Field("suspect", "requeue", "claim"),
    Field("revision", "submit, edit", "edit, progress", int),
    Field("owner", "claim, requeue", "fences of a claim, sweep", str, ""),
    Field("priority", "submit, edit", "clients", str),
    Field("score", "submit, edit", "queue of a replica", float),
    Field("created_at", "submit", "lists, clients", float),
    Field("started_at", "claim, requeue", "clients", _number, ""),
    Field("finished_at", "finish", "clients", _number, ""),
    Field("start_by", "submit, edit", "claim, expire, clients", _number, ""),
    Field("begun", "claim", "claim, expire"),
    Field("timeout", "submit, edit", "replica, clients", _number, ""),
    Field("step", "claim, progress, finish, requeue", "choice, clients", int, "0"),
    Field("steps", "claim, progress, finish, requeue", "choice, clients", int, "0"),
    Field("step_s", "progress", "clients", _number, ""),
    Field("cancel", "cancel", "progress, finish, requeue, clients", _flag, ""),
    Field("hidden", "cancel", "every read of clients"),
    Field("timings", "finish", "clients", json.loads, "{}"),
    Field("outputs", "finish", "clients", json.loads, "[]"),
    Field("warnings", "submit, finish", "clients", json.loads, "[]"),
    Field("error", "finish, expire, requeue", "clients", json.loads, "null"),
    Field("metadata", "submit", "clients", json.loads, "{}"),
    Field("idempotency_key", "submit", "cancel, forget"),
    Field("affinity_key", "submit", "requeue, clients", str, ""),
    Field("shares", "submit, edit", "claim"),
    Field("overtaken", "claim", "claim"),
    Field("held_until", "submit, requeue", "claim"),
    Field("client", "submit", "finish, clients", str, ""),
    Field("client_s", "submit", "finish"),
    Field("counted_at", "submit", "submit, edit", _number, ""),
    Field("webhook", "submit", "outbox, clients", json.loads, "null"),
    Field("webhook_tries", "outbox_take", "outbox, clients", int, "0"),
    Field("webhook_since", "outbox_take", "outbox"),
    Field("webhook_delivered_at", "outbox_settle", "clients", _number, ""),
    Field("webhook_error", "outbox_settle", "clients", str, ""),
)

REPLICA: Final = (
    Field("name", "heartbeat", "clients", str),
    Field("incarnation", "heartbeat", "claim, command, sweep", str),
    Field("stage", "heartbeat", "command, clients", int),
    Field("state", "heartbeat, command", "command, clients", str),
    Field("beat_at", "heartbeat", "sweep, clients"),
    Field("model", "heartbeat", "clients", json.loads),
    Field("node", "heartbeat", "control commands", json.loads),
    Field("host", "heartbeat", "clients", json.loads),
    Field("pid", "heartbeat", "launcher, clients", json.loads),
    Field("devices", "heartbeat", "clients", json.loads),
    Field("device_kind", "heartbeat", "clients", json.loads),
    Field("capacity", "heartbeat", "clients", json.loads, "1"),
    Field("started_at", "heartbeat", "clients", json.loads, "0.0"),
    Field("step_s", "heartbeat", "clients", json.loads, "null"),
    Field("memory_bytes", "heartbeat", "clients", json.loads, "null"),
    Field("device_memory_bytes", "heartbeat", "clients", json.loads, "null"),
    Field("stopping", "heartbeat", "command", _flag),
    Field("error", "heartbeat", "clients", json.loads, "null"),
    Field("lasting", "heartbeat", "forgetting", json.loads, "false"),
    Field("activity", "heartbeat", "launcher, clients", json.loads, "null"),
    Field("downloaded_bytes", "heartbeat", "clients", json.loads, "null"),
    Field("download_bytes", "heartbeat", "clients", json.loads, "null"),
    Field("restart", "command", "heartbeat, claim"),
    Field("drain_at", "command", "heartbeat"),
    Field("drain_s", "command", "heartbeat"),
)

TOTALS: Final = (
    Field("completed", "finish", "clients", int, "0"),
    Field("failed", "finish, requeue", "clients", int, "0"),
    Field("restarts", "heartbeat", "clients", int, "0"),
    Field("stolen", "claim", "clients", int, "0"),
    Field("busy_from", "claim, finish", "choice of a replica"),
    Field("busy_s", "finish", "choice of a replica"),
    Field("busy_work", "finish", "choice of a replica"),
)


def read_hash(table: tuple[Field, ...], stored: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a table that Python reads, parsed, by name.

    Raises:
        KeyError: A field that is always set is not.
    """
    return {
        field.name: field.parse(
            stored[field.name] if field.absent is None else stored.get(field.name) or field.absent
        )
        for field in table
        if field.parse is not None
    }
