"""What happened to requests and when, as the stream of changes tells it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from redis import Redis

TERMINAL = {"succeeded", "failed", "canceled", "expired"}


@dataclass(frozen=True)
class Blow:
    """The end of a replica's process.

    Attributes:
        replica: Its name.
        at: When, in seconds since the epoch.
    """

    replica: str
    at: float


@dataclass(frozen=True)
class Change:
    """One entry of the stream; `replica` is empty where the entry names none."""

    at: float
    event: str
    request: str
    replica: str


@dataclass(frozen=True)
class History:
    """Changes in their order."""

    changes: tuple[Change, ...]

    @classmethod
    def read(cls, client: Redis, prefix: str) -> Self:
        """Read the whole stream; its entries bear the time of the Redis server."""
        entries: Any = client.xrange(f"{prefix}changes")
        return cls(
            tuple(
                Change(
                    int(name.partition("-")[0]) / 1000,
                    entry["event"],
                    entry["id"],
                    entry.get("replica", ""),
                )
                for name, entry in entries
            )
        )

    def of(self, requests: Collection[str]) -> History:
        """Return what happened to these requests."""
        chosen = frozenset(requests)
        return History(tuple(change for change in self.changes if change.request in chosen))

    def starts(self, request: str) -> int:
        """Return how often a request began to run."""
        return sum(c.event == "started" for c in self.changes if c.request == request)

    def commits(self, request: str) -> int:
        """Return how often a request was recorded as succeeded."""
        return sum(c.event == "succeeded" for c in self.changes if c.request == request)

    def recovery_s(self, blow: Blow) -> float:
        """Return the seconds from a blow until all that ran there had been given to the living.

        A request that ran at that moment and never moved after it counts as infinitely late.
        """
        latest = 0.0
        for request in {change.request for change in self.changes}:
            moves = [
                change
                for change in self.changes
                if change.request == request and change.event in {"queued", "started", *TERMINAL}
            ]
            before = [change for change in moves if change.at <= blow.at]
            after = [change for change in moves if change.at > blow.at]
            ran = bool(before) and (before[-1].event, before[-1].replica) == (
                "started",
                blow.replica,
            )
            # What ended in the moment of the blow had nothing to be recovered from.
            if ran and not (after and after[0].event in TERMINAL):
                latest = max(latest, (after[0].at if after else float("inf")) - blow.at)
        return latest
