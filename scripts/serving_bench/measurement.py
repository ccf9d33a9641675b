"""The measurement from end to end: wait for the service, warm it, run under the clock, clean up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from scripts.serving_bench.backend import Backend
from scripts.serving_bench.clocked_run import ClockedRun, Measurement
from scripts.serving_bench.data_set import planned_requests
from scripts.serving_bench.http_call import Caller, RequestFailed, open_session
from scripts.serving_bench.native_backend import NativeBackend
from scripts.serving_bench.openai_backends import ChatBackend, ImagesBackend
from scripts.serving_bench.options import Options
from scripts.serving_bench.outcome import Outcome
from scripts.serving_bench.service_view import (
    ReplicaView,
    pick_model,
    replicas_of,
    served_since,
    wait_loaded,
    wait_ready,
)
from scripts.serving_bench.slo import with_goals
from scripts.serving_bench.videos_backend import VideosBackend
from scripts.serving_bench.warm_up import WarmUp

_REMOVE_AT_A_TIME: Final = 8


async def measure(options: Options, say: Callable[[str], None] = print) -> Measurement:
    """Run the benchmark.

    Canceled (Ctrl-C), it cancels in the service what is still on the way.

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


async def _remove(backend: Backend, outcomes: Sequence[Outcome]) -> None:
    """Remove what the service keeps of the succeeded ones; the clock no longer runs."""
    places = asyncio.Semaphore(_REMOVE_AT_A_TIME)

    async def remove(request_id: str) -> None:
        async with places:
            with suppress(RequestFailed):
                await backend.remove(request_id)

    ids = [one.reply.request_id for one in outcomes if one.reply and one.reply.request_id]
    await asyncio.gather(*(remove(request_id) for request_id in ids))
