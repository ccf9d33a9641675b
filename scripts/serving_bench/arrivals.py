"""When each request arrives, in seconds from the start. Knows no clock and sends nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from scripts.serving_bench.options import Options
from scripts.serving_bench.planned_request import PlannedRequest


def arrival_times(requests: Sequence[PlannedRequest], options: Options) -> tuple[list[float], str]:
    """Return the arrival of each request and the name of the pattern.

    A rate on the command line counts; without one the timestamps of the trace; else all arrive at
    once. Poisson arrivals have gaps of exponential length, always the same for one
    `arrival_seed`; the first arrives at once.
    """
    rate = options.request_rate
    if rate is not None and math.isfinite(rate):
        draw = random.Random(options.arrival_seed)
        times = [0.0]
        for _ in requests[1:]:
            times.append(times[-1] + draw.expovariate(rate))
        return times, f"Poisson, {rate:g} a second"
    stamps = [request.timestamp_s for request in requests if request.timestamp_s is not None]
    if rate is None and len(stamps) == len(requests):
        first, speed = min(stamps), options.trace_speed
        times = [(stamp - first) / speed for stamp in stamps]
        return times, "timestamps of the trace" + (f", {speed:g} times as fast" * (speed != 1))
    return [0.0] * len(requests), "all at once"
