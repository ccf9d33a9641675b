"""One request that the benchmark is going to send. Knows no HTTP and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Shape = tuple[int | None, int | None, int | None]


class BenchRefused(Exception):
    """Raised when the benchmark cannot start or go on; its text is one line that names the mend."""


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
