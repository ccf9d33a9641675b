"""The service as the benchmark sees it: whether it is ready, its models, its replicas.

A service without our native calls (vLLM-Omni itself) has no list of replicas; it is then measured
without figures for each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from scripts.serving_bench.http_call import NO_ANSWER, Caller, RequestFailed, pause
from scripts.serving_bench.requests import BenchRefused

_LOOK_EVERY_S: Final = 0.5
_MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class ReplicaView:
    """One replica at one moment; `memory_mb` is MiB of its device, or of its process on a CPU."""

    name: str
    state: str
    devices: tuple[int, ...]
    device_kind: str
    capacity: int
    completed: int
    failed: int
    memory_mb: float | None


async def wait_ready(caller: Caller, base_url: str, timeout_s: float) -> None:
    """Return once the service can serve.

    Raises:
        BenchRefused: It cannot within `timeout_s` seconds; the reason is its own.
    """
    deadline = time.monotonic() + timeout_s
    path = "/ready"
    while True:
        try:
            await caller.call("GET", path)
        except RequestFailed as failed:
            if failed.status == 404 and path == "/ready":
                path = "/health"
                continue
            if failed.status in {401, 403}:
                return  # it answers; what a key is for is found out by the next call
            if time.monotonic() >= deadline:
                raise _not_ready(base_url, failed, timeout_s) from None
            await pause(_LOOK_EVERY_S)
        else:
            return


async def pick_model(caller: Caller, wanted: str | None) -> str:
    """Return the wanted model, or the only one that is served.

    Raises:
        BenchRefused: There are several and none was named, or the named one is not served.
    """
    try:
        listed = (await caller.call("GET", "/v1/models")).json
    except RequestFailed as failed:
        raise BenchRefused(f"GET /v1/models was refused: {failed.message}") from None
    names = [str(model["id"]) for model in listed["data"]]
    if wanted in names:
        return str(wanted)
    known = ", ".join(names) or "none"
    if wanted is not None:
        raise BenchRefused(f"--model {wanted} is not available; use {known}")
    if len(names) != 1:
        raise BenchRefused(f"several models are served; choose one with --model: {known}")
    return names[0]


async def wait_loaded(caller: Caller, model: str, timeout_s: float) -> list[ReplicaView]:
    """Return the ready replicas once none of the model is loading, or after `timeout_s` seconds.

    The service is ready with its first replica; those that load would join in mid-measurement.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        views = await replicas_of(caller, model, states=("ready", "loading"))
        if all(view.state == "ready" for view in views) or time.monotonic() >= deadline:
            return [view for view in views if view.state == "ready"]
        await pause(_LOOK_EVERY_S)


async def replicas_of(
    caller: Caller, model: str, states: Sequence[str] = ("ready",)
) -> list[ReplicaView]:
    """Return the replicas of the model; none where the service does not list replicas."""
    try:
        listed = (await caller.call("GET", "/v1/replicas")).json
    except RequestFailed as failed:
        if failed.status == 404:
            return []
        raise
    return [
        _view(replica)
        for replica in listed["data"]
        if replica["model"] == model and replica["state"] in states
    ]


def served_since(
    before: Sequence[ReplicaView], after: Sequence[ReplicaView]
) -> dict[str, tuple[int, int]]:
    """Return how many requests each replica completed and failed between two looks."""
    earlier = {view.name: view for view in before}
    return {
        view.name: (
            view.completed - (earlier[view.name].completed if view.name in earlier else 0),
            view.failed - (earlier[view.name].failed if view.name in earlier else 0),
        )
        for view in after
    }


def _view(replica: Any) -> ReplicaView:
    memory = replica.get("device_memory_bytes") or replica.get("memory_bytes")
    return ReplicaView(
        name=replica["name"],
        state=replica["state"],
        devices=tuple(replica["devices"]),
        device_kind=replica["device_kind"],
        capacity=replica["capacity"],
        completed=replica["completed"],
        failed=replica["failed"],
        memory_mb=round(memory / _MIB, 1) if memory else None,
    )


def _not_ready(base_url: str, failed: RequestFailed, timeout_s: float) -> BenchRefused:
    if failed.code == NO_ANSWER:
        return BenchRefused(
            f"nothing answers at {base_url}; start the service, such as by `make serve`, or give "
            "--base-url"
        )
    return BenchRefused(
        f"the service at {base_url} is not ready after {timeout_s:g} s: {failed.message}"
    )
