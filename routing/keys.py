"""The data model in Redis: every key, what it holds and how long it lives.

All keys start with ``REDIS_PREFIX``. The Lua files under ``routing/lua`` build the same names from
the prefix, in ``record.lua``; no other file spells a key. One Redis, with or without replicas of
its own; Redis Cluster is not supported, since one script touches several keys.

======================= ======= ============================================================
key                     type    holds; lifetime
======================= ======= ============================================================
request:{id}            hash    the record, the only truth; ``RETENTION_S`` after its end
request:{id}:preview    string  newest preview, base64 of a JPEG; to its end, an hour at most
requests                zset    id by creation time; with the record
requests:{status}       zset    the same for one status
requests:any:{model}    zset    the same for one model
requests:{status}:{m}   zset    the same for one status of one model
requests:kind:{kind}    zset    the same for one kind of output, image or video
finished                zset    id by time of its end; with the record
deliveries              zset    "id event" of webhooks by the moment it is due; until it is settled
deadlines               zset    waiting id by the moment it must start by; until it does
idempotency:{key}       string  "fingerprint id" of a submit; with the record
replica:{name}          hash    the last heartbeat and what an operator wants of the replica; an
                                hour after it was last seen
replica:{name}:waiting  zset    queued ids by their place in the line; empty is no key
replica:{name}:work     string  steps x pixels of all that waits there; with the line
replica:{name}:running  set     ids the replica has claimed; empty is no key
replica:{name}:totals   hash    completed, failed, restarts, work by time; with the replica
replicas                zset    replica name by the moment its heartbeat expires
drained                 set     names taken out of the rotation by hand; until resumed
stage:{id}:ready        zset    names in the rotation by the moment their heartbeat expires
stage:{id}:turn         string  round-robin counter; kept
models                  hash    model name to its stage and abilities; kept
loose                   zset    id whose files may have no record, by the moment it was noted; until
                                it is recorded or its files are gone, some more than an hour
changes                 stream  one entry for each change of a record; the newest 10 000
sweep                   string  lock of the failover sweep; seconds
======================= ======= ============================================================

Celery keeps its own under the same prefix: a list for each replica's queue, ``unacked``, bindings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix."""

    prefix: str

    def request(self, request_id: str) -> str:
        """Return the key of a record."""
        return f"{self.prefix}request:{request_id}"

    def preview(self, request_id: str) -> str:
        """Return the key of a request's newest preview."""
        return f"{self.prefix}request:{request_id}:preview"

    def waiting(self, replica: str) -> str:
        """Return the key of a replica's line of queued requests."""
        return f"{self.prefix}replica:{replica}:waiting"

    def running(self, replica: str) -> str:
        """Return the key of the requests a replica has claimed."""
        return f"{self.prefix}replica:{replica}:running"

    def replica(self, name: str) -> str:
        """Return the key of a replica's last heartbeat."""
        return f"{self.prefix}replica:{name}"

    def totals(self, name: str) -> str:
        """Return the key of a replica's counters."""
        return f"{self.prefix}replica:{name}:totals"

    def ready(self, stage: int) -> str:
        """Return the key of a stage's rotation."""
        return f"{self.prefix}stage:{stage}:ready"

    def queue(self, name: str) -> str:
        """Return the key of the list in which Celery keeps the messages of a queue."""
        return f"{self.prefix}{name}"

    @property
    def requests(self) -> str:
        """The key of all records by creation time."""
        return f"{self.prefix}requests"

    def listed(self, status: str | None, model: str | None) -> str:
        """Return the key of the records of a status and a model by creation time; None is any."""
        if model is None:
            return self.requests if status is None else f"{self.requests}:{status}"
        return f"{self.requests}:{status or 'any'}:{model}"

    def of_kind(self, kind: str) -> str:
        """Return the key of the records of one kind of output by creation time."""
        return f"{self.requests}:kind:{kind}"

    @property
    def finished(self) -> str:
        """The key of ended records by the time of their end."""
        return f"{self.prefix}finished"

    @property
    def replicas(self) -> str:
        """The key of all replicas by the moment their heartbeat expires."""
        return f"{self.prefix}replicas"

    @property
    def drained(self) -> str:
        """The key of the replicas taken out of the rotation by hand."""
        return f"{self.prefix}drained"

    @property
    def deliveries(self) -> str:
        """The key of the webhook deliveries by the moment they are due."""
        return f"{self.prefix}deliveries"

    @property
    def models(self) -> str:
        """The key of the models and their abilities."""
        return f"{self.prefix}models"

    @property
    def changes(self) -> str:
        """The key of the stream of changes."""
        return f"{self.prefix}changes"

    @property
    def orphaned(self) -> str:
        """The key of the ids whose files may have no record."""
        return f"{self.prefix}loose"

    @property
    def sweep(self) -> str:
        """The key of the failover sweep's lock."""
        return f"{self.prefix}sweep"
