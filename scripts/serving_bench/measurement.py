"""The measurement from end to end: wait for the service, warm up, run under the clock."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from tqdm import tqdm

from scripts.serving_bench.backends import (
    Backend,
    ChatBackend,
    ImagesBackend,
    NativeBackend,
    VideosBackend,
)
from scripts.serving_bench.data_sets import planned_requests
from scripts.serving_bench.http_call import Caller, RequestFailed, open_session
from scripts.serving_bench.options import Options
from scripts.serving_bench.requests import (
    BenchRefused,
    PlannedRequest,
    Reply,
    RequestResult,
    arrival_times,
)
from scripts.serving_bench.service_view import (
    ReplicaView,
    pick_model,
    replicas_of,
    served_since,
    wait_loaded,
    wait_ready,
)

_MOST_SHAPES: Final = 8
_MOST_ROUNDS: Final = 20


class WarmUp:
    """What has to be served before the measurement, and by whom."""

    def __init__(self, backend: Backend, caller: Caller, model: str, options: Options) -> None:
        """Send through `backend`."""
        self._backend = backend
        self._caller = caller
        self._model = model
        self._options = options
        self.sent = 0

    async def run(self, requests: Sequence[PlannedRequest]) -> None:
        """Warm every replica for the sizes of the requests.

        Raises:
            BenchRefused: A warm-up request failed, or a replica stayed without one.
        """
        share = self._options.warmup_requests
        if share < 1:
            return
        for request in self._patterns(requests):
            replicas = await replicas_of(self._caller, self._model)
            if not replicas:
                await self._send([request] * share)
                continue
            # A replica that shares steps must have shared one.
            together = max(min(view.capacity, 2) for view in replicas)
            await self._each_replica(request, max(share, together))

    def _patterns(self, requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
        """One short request for each of the most frequent sizes."""
        counts = Counter(request.shape for request in requests)
        shapes = [shape for shape, _ in counts.most_common(_MOST_SHAPES)]
        firsts = [next(one for one in requests if one.shape == shape) for shape in shapes]
        steps = self._options.warmup_num_inference_steps
        return [
            replace(one.with_(num_inference_steps=steps), prompt=f"warm-up {number}, {one.prompt}")
            for number, one in enumerate(firsts)
        ]

    async def _each_replica(self, request: PlannedRequest, share: int) -> None:
        before = await replicas_of(self._caller, self._model)
        for _ in range(_MOST_ROUNDS):
            after = await replicas_of(self._caller, self._model)
            served = served_since(before, after)
            missing = sum(max(0, share - completed) for completed, _ in served.values())
            if after and not missing:
                return
            await self._send([request] * max(missing, share * len(after)))
        left = [name for name, (completed, _) in served.items() if completed < share]
        raise BenchRefused(
            f"{', '.join(left)} got no warm-up request in {_MOST_ROUNDS} rounds; check whether it "
            "is drained, or busy with another client"
        )

    async def _send(self, requests: Sequence[PlannedRequest]) -> None:
        self.sent += len(requests)
        for reply in await asyncio.gather(*(self._one(request) for request in requests)):
            if reply.request_id is not None and not self._options.keep_outputs:
                await self._backend.remove(reply.request_id)

    async def _one(self, request: PlannedRequest) -> Reply:
        try:
            async with asyncio.timeout(self._options.timeout):
                return await self._backend.run(request)
        except RequestFailed as failed:
            raise BenchRefused(
                f"a warm-up request failed ({failed.code}): {failed.message}"
            ) from None
        except TimeoutError:
            raise BenchRefused(
                f"a warm-up request took longer than {self._options.timeout:g} s (--timeout)"
            ) from None


_MOST_KINDS: Final = 4


async def with_goals(
    requests: Sequence[PlannedRequest], backend: Backend, options: Options
) -> list[PlannedRequest]:
    """Return the requests, each with a goal: its own, `slo_ms`, or one from a request alone.

    Raises:
        BenchRefused: A request sent for its time alone failed.
    """
    if options.slo_ms is not None:
        return [_or_else(request, options.slo_ms) for request in requests]
    without = [request for request in requests if request.slo_ms is None]
    if not without:
        return list(requests)
    kinds = Counter((request.shape, request.steps) for request in without)
    alone: dict[object, float] = {}
    for kind, _ in kinds.most_common(_MOST_KINDS):
        request = next(one for one in without if (one.shape, one.steps) == kind)
        alone[kind] = await _timed(request, backend, options) / _units(request)
    base = median(alone.values())
    return [
        _or_else(
            request,
            alone.get((request.shape, request.steps), base) * _units(request) * options.slo_scale,
        )
        for request in requests
    ]


async def _timed(request: PlannedRequest, backend: Backend, options: Options) -> float:
    """Milliseconds that the request takes alone."""
    started = time.perf_counter()
    try:
        reply = await backend.run(request)
        took_ms = (time.perf_counter() - started) * 1000
        if reply.request_id is not None and not options.keep_outputs:
            await backend.remove(reply.request_id)
    except RequestFailed as failed:
        raise BenchRefused(
            f"a request sent alone for the latency goal failed ({failed.code}): {failed.message}"
        ) from None
    return took_ms


def _units(request: PlannedRequest) -> float:
    """Its cost in proportion: pixels x frames x steps, what is not given counting as 1."""
    width, height, frames = request.shape
    return float((width or 1) * (height or 1) * (frames or 1) * (request.steps or 1))


def _or_else(request: PlannedRequest, slo_ms: float) -> PlannedRequest:
    return request if request.slo_ms is not None else replace(request, slo_ms=slo_ms)


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
    outcomes: tuple[RequestResult, ...]
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

    async def _one(self, request: PlannedRequest, arrival: float, bar: tqdm[Any]) -> RequestResult:
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
        return RequestResult(
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


_REMOVE_AT_A_TIME: Final = 8


async def measure(options: Options, say: Callable[[str], None] = print) -> Measurement:
    """Run the benchmark.

    Canceled (Ctrl-C), it cancels in the service what is still in flight.

    Raises:
        BenchRefused: It cannot start: the service, the data set or the warm-up say no.
    """
    requests, notes = planned_requests(options)
    for note in notes:
        say(note)
    async with open_session(options.api_key) as session:
        caller = Caller(session, options.base_url)
        await wait_ready(caller, options.base_url, options.ready_timeout)
        model = await pick_model(caller, options.model)
        await wait_loaded(caller, model, options.ready_timeout)
        backend = make_backend(options, caller, model)
        warm_up = WarmUp(backend, caller, model, options)
        await warm_up.run(requests)
        if options.slo or options.slo_ms is not None:
            requests = await with_goals(requests, backend, options)
        run = ClockedRun(backend, options, requests)
        before = await replicas_of(caller, model)
        measured = await run.all(model, warm_up.sent)
        after = await replicas_of(caller, model)
        if {view.name for view in before} != {view.name for view in after}:
            say(f"The replicas changed meanwhile: {_names(before)} before, {_names(after)} after")
        if not options.keep_outputs:
            await _remove(backend, measured.outcomes)
    return replace(measured, replicas=tuple(after), served=served_since(before, after))


def make_backend(options: Options, caller: Caller, model: str) -> Backend:
    """Return the backend of that name."""
    if options.backend == "openai":
        return ImagesBackend(caller, model)
    if options.backend == "vllm-omni":
        return ChatBackend(caller, model)
    if options.backend == "v1/videos":
        return VideosBackend(caller, model, options.poll_interval)
    return NativeBackend(caller, model)


def _names(views: Sequence[ReplicaView]) -> str:
    return ", ".join(view.name for view in views) or "none"


async def _remove(backend: Backend, outcomes: Sequence[RequestResult]) -> None:
    """Remove what the service keeps of the succeeded ones; the clock no longer runs."""
    places = asyncio.Semaphore(_REMOVE_AT_A_TIME)

    async def remove(request_id: str) -> None:
        async with places:
            with suppress(RequestFailed):
                await backend.remove(request_id)

    ids = [one.reply.request_id for one in outcomes if one.reply and one.reply.request_id]
    await asyncio.gather(*(remove(request_id) for request_id in ids))
