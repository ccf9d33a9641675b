"""How a request stands and how a run of it ends: status, outputs, failure, timings.

Knows how they look in a record. Does not know who records them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Self


class Status(StrEnum):
    """Where a request stands: queued → running → one of the terminal ones."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    EXPIRED = "expired"


ACTIVE = frozenset({Status.QUEUED, Status.RUNNING})
TERMINAL = frozenset(Status) - ACTIVE


@dataclass(frozen=True, slots=True)
class Output:
    """One file a request produced; ``name`` is its place in the output store.

    ``num_frames`` and ``fps`` are None unless it is a video.
    """

    name: str
    media_type: str
    width: int
    height: int
    seed: int
    bytes: int
    sha256: str
    num_frames: int | None = None
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended without outputs."""

    code: str
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each part of a run; None where that part was not reached.

    ``batch_mean`` is the mean number of requests that shared a denoiser call of this one.
    """

    encode_s: float | None = None
    denoise_s: float | None = None
    decode_s: float | None = None
    batch_mean: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: what a replica records at the end of a claim."""

    status: Status
    outputs: tuple[Output, ...] = ()
    warnings: tuple[str, ...] = ()
    timings: Timings = Timings()
    error: Failure | None = None
    step: int = 0
    steps: int = 0

    def at(self, step: int, steps: int) -> Self:
        """Return it with the denoising steps that were done when it came."""
        return replace(self, step=step, steps=steps)

    def to_fields(self) -> dict[str, str]:
        """Return the fields of the record that this outcome sets, status left out."""
        fields = {
            "step": str(self.step),
            "steps": str(self.steps),
            "outputs": json.dumps([asdict(output) for output in self.outputs]),
            "warnings": json.dumps(list(self.warnings)),
            "timings": json.dumps(asdict(self.timings)),
        }
        if self.error is not None:
            fields["error"] = json.dumps(asdict(self.error))
        return fields
