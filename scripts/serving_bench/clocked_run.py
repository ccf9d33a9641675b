"""The part under the clock: sends every request in its time and keeps score.

Latency is counted from sending a request to holding its outputs, as vLLM-Omni's client counts it;
what a request waited in this client for a place under `max_concurrency` is counted apart.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from scripts.serving_bench.arrivals import arrival_times
from scripts.serving_bench.backend import Backend
from scripts.serving_bench.http_call import RequestFailed
from scripts.serving_bench.options import Options
from scripts.serving_bench.outcome import Outcome, Reply
from scripts.serving_bench.planned_request import PlannedRequest
from scripts.serving_bench.service_view import ReplicaView

_SUFFIXES: Final = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp"}


@dataclass(frozen=True)
class Measurement:
    """All that was seen; `scripts/serving_bench/figures.py` makes figures of it.

    Attributes:
        model: What was asked for outputs.
        arrivals: Name of the arrival pattern.
        started_at: Start of the clock, in UTC; `epoch_s` is the same in seconds since the epoch.
        duration_s: From the start to the end of the last request.
        outcomes: One for each request, in the order of the data set.
        replicas: The ready replicas at the end.
        served: What each of them completed and failed meanwhile, by its own counters.
        warmup_requests: How many were sent before the clock ran.
        client_cpu_share: CPU time of this client over the duration; near 1 it is the limit itself.
        load: Load averages (one minute) of this machine before and after.
    """

    model: str
    arrivals: str
    started_at: datetime
    epoch_s: float
    duration_s: float
    outcomes: tuple[Outcome, ...]
    replicas: tuple[ReplicaView, ...]
    served: dict[str, tuple[int, int]]
    warmup_requests: int
    client_cpu_share: float
    load: tuple[float, float]


class ClockedRun:
    """Sends the requests, each in its time."""

    def __init__(
        self, backend: Backend, options: Options, requests: Sequence[PlannedRequest]
    ) -> None:
        self._backend = backend
        self._options = options
        self._requests = requests
        self._places = asyncio.Semaphore(options.max_concurrency or len(requests))
        self._started = 0.0

    async def all(self, model: str, warmed: int) -> Measurement:
        """Send all and return what was seen; `warmed` is how many were sent before."""
        arrivals, pattern = arrival_times(self._requests, self._options)
        load = os.getloadavg()[0]
        with tqdm(
            total=len(self._requests), unit="request", disable=self._options.disable_tqdm
        ) as bar:
            started_at, cpu = datetime.now(UTC), time.process_time()
            self._started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(request, arrival, bar))
                    for request, arrival in zip(self._requests, arrivals, strict=True)
                ]
            duration = time.perf_counter() - self._started
        return Measurement(
            model=model,
            arrivals=pattern,
            started_at=started_at,
            epoch_s=started_at.timestamp(),
            duration_s=duration,
            outcomes=tuple(task.result() for task in tasks),
            replicas=(),
            served={},
            warmup_requests=warmed,
            client_cpu_share=(time.process_time() - cpu) / duration,
            load=(load, os.getloadavg()[0]),
        )

    async def _one(self, request: PlannedRequest, arrival: float, bar: tqdm[Any]) -> Outcome:
        await asyncio.sleep(max(0.0, arrival - self._now()))
        async with self._places:
            sent = self._now()
            reply: Reply | None = None
            code, message = None, ""
            try:
                async with asyncio.timeout(self._options.timeout):
                    reply = await self._backend.run(request)
            except RequestFailed as failed:
                code, message = failed.code, failed.message
            except (LookupError, TypeError, ValueError) as error:
                code, message = "unexpected_answer", f"{type(error).__name__}: {error}"
            except TimeoutError:
                code, message = "client_timeout", f"not done in {self._options.timeout:g} s"
            done = self._now()
        if reply is not None and self._options.save_dir is not None:
            _save(reply, request.index, self._options.save_dir)
        bar.update()
        return Outcome(
            index=request.index,
            arrived_s=arrival,
            sent_s=sent,
            done_s=done,
            slo_ms=request.slo_ms,
            reply=reply and _without_content(reply),
            error_code=code,
            error_message=message,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._started


def _without_content(reply: Reply) -> Reply:
    """A long run would hold every picture to its end."""
    return replace(reply, outputs=tuple(replace(output, content=b"") for output in reply.outputs))


def _save(reply: Reply, index: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, output in enumerate(reply.outputs):
        suffix = _SUFFIXES.get(output.media_type, output.media_type.rpartition("/")[2])
        (folder / f"{index:05d}_{number}.{suffix}").write_bytes(output.content)
