"""What came of one request: the service's word in a reply, and ours in an outcome.

Knows no HTTP. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class Outcome:
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
