"""Latency goals (SLO) of requests that bring none of their own.

The goal is `slo_scale` times the latency of such a request alone. One request of each of the most
frequent kinds is timed, with all its steps, after the warm-up; the others follow in proportion to
pixels, frames and steps. (vLLM-Omni's client takes its base from warm-ups of a step or two, in
which fixed costs outweigh the steps, so that its goals are loose.)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from scripts.serving_bench.backend import Backend
from scripts.serving_bench.http_call import RequestFailed
from scripts.serving_bench.options import Options
from scripts.serving_bench.planned_request import BenchRefused, PlannedRequest

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
