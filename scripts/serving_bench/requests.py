"""One request of the benchmark: as planned, when it arrives, and what came of it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.serving_bench.options import Options

Shape = tuple[int | None, int | None, int | None]


class BenchRefused(Exception):
    """Raised when the benchmark cannot start or go on; its text is one line that names the fix."""


@dataclass(frozen=True)
class PlannedRequest:
    """What is asked for, and when it is to arrive.

    Attributes:
        index: Its place in the data set.
        prompt: What the output shows.
        parameters: The other fields of the request by their names in the API; only those given.
        images: Input images of the tasks that take one.
        timestamp_s: Arrival in the trace, in the trace's own time; None where it has none.
        slo_ms: Latency within which it is to be answered, in milliseconds; None for no such goal.
    """

    index: int
    prompt: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Path, ...] = ()
    timestamp_s: float | None = None
    slo_ms: float | None = None

    @property
    def shape(self) -> Shape:
        """Width and height in pixels and number of frames; None where the model's default holds."""
        found = (self.parameters.get(name) for name in ("width", "height", "num_frames"))
        width, height, frames = found
        return width, height, frames

    @property
    def steps(self) -> int | None:
        """Denoising steps; None for the model's default."""
        steps: int | None = self.parameters.get("num_inference_steps")
        return steps

    def with_(self, **parameters: Any) -> PlannedRequest:
        """Return the same request with other parameters."""
        return replace(self, parameters={**self.parameters, **parameters})


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


@dataclass(frozen=True)
class MadeOutput:
    """One file as it came over the wire."""

    media_type: str
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Reply:
    """What the service says of a request that has succeeded; None where this backend does not.

    Attributes:
        request_id: Its id in the service.
        replica: The replica that made it.
        attempt: 1, and one more after each move to another replica.
        queued_s: From its acceptance to its start on a replica.
        run_s: From its start to its end there.
        started_at: When it started, by the clock of the service, in seconds since the epoch.
        batch_mean: Mean number of requests that shared a denoiser call with it.
        stage_durations: Seconds of each part of the run.
        peak_memory_mb: Device memory, in MiB.
    """

    outputs: tuple[MadeOutput, ...]
    request_id: str | None = None
    replica: str | None = None
    attempt: int = 1
    queued_s: float | None = None
    run_s: float | None = None
    started_at: float | None = None
    batch_mean: float | None = None
    stage_durations: Mapping[str, float] = field(default_factory=dict)
    peak_memory_mb: float | None = None


@dataclass(frozen=True)
class RequestResult:
    """One request as the client saw it, its times counted from the start of the measurement.

    Attributes:
        index: Its place in the data set.
        arrived_s: When it was to be sent.
        sent_s: When it was sent: later where `max_concurrency` made it wait.
        done_s: When the last byte of its outputs was here, or it had failed.
        slo_ms: Its latency goal, in milliseconds.
        reply: None for a failed one.
        error_code: Why it failed, as a word; None for a succeeded one.
        error_message: The same for people.
    """

    index: int
    arrived_s: float
    sent_s: float
    done_s: float
    slo_ms: float | None = None
    reply: Reply | None = None
    error_code: str | None = None
    error_message: str = ""

    @property
    def latency_s(self) -> float:
        """From sending it to holding its outputs."""
        return self.done_s - self.sent_s

    @property
    def met_slo(self) -> bool | None:
        """Whether it met its goal; a failed one did not; None for one without a goal."""
        if self.slo_ms is None:
            return None
        return self.reply is not None and (self.done_s - self.arrived_s) * 1000 <= self.slo_ms
