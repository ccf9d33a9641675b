"""What a finished request cost, in the places where the clients of diffusion servers look for it.

Numbers only: clients add them up without asking. Does not know the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

from redis.exceptions import RedisError

from routing.record import Request
from routing.registry import Registry

_DIGITS: Final = 6
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Measurements:
    """Durations of one request and the memory of its replica.

    Attributes:
        stage_durations: Seconds by part: `queued`, `encode`, `denoise`, `decode`.
        total_s: Seconds from submit to end; 0 before that.
        peak_memory_mb: MiB that the replica's process holds on its devices, which its allocator
            does not give back between requests; on CPU those of the process. 0 where unknown.
    """

    stage_durations: dict[str, float]
    total_s: float
    peak_memory_mb: float

    @classmethod
    def of(cls, request: Request, registry: Registry) -> Self:
        """Measure a request as far as it got."""
        begun = request.started_at or request.finished_at
        seconds = {
            "queued": None if begun is None else begun - request.created_at,
            "encode": request.timings.encode_s,
            "denoise": request.timings.denoise_s,
            "decode": request.timings.decode_s,
        }
        durations = {
            name: round(max(0.0, value), _DIGITS)
            for name, value in seconds.items()
            if value is not None
        }
        ended = request.finished_at
        total_s = 0.0 if ended is None else round(max(0.0, ended - request.created_at), _DIGITS)
        return cls(durations, total_s, _memory_mb(request, registry))

    def to_json(self) -> dict[str, Any]:
        """Return them as `metrics` shows them."""
        return {
            "stage_durations": self.stage_durations,
            "total_s": self.total_s,
            "peak_memory_mb": self.peak_memory_mb,
        }


def _memory_mb(request: Request, registry: Registry) -> float:
    try:
        replica = registry.get(request.replica)
    except RedisError:
        # The output is there; a figure beside it is not worth losing it.
        return 0.0
    if replica is None:
        return 0.0
    held = replica.heartbeat.device_memory_bytes or replica.heartbeat.memory_bytes or 0
    return round(held / _MIB, 3)
