"""A request that makes a video, as OpenAI's clients and those of diffusion servers see it.

Does not read the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from api.openai.measurements import Measurements
from configs.settings import Settings
from routing.formats import MEDIA_TYPES
from routing.outcome import Status
from routing.record import Request
from routing.registry import Registry

_STATUS: Final = {
    Status.QUEUED: "queued",
    Status.RUNNING: "in_progress",
    Status.SUCCEEDED: "completed",
}
_FAILED: Final = "failed"
_DIGITS: Final = 3
_PERCENT: Final = 100


def video_object(
    request: Request, registry: Registry, settings: Settings, left_aside: Sequence[str]
) -> dict[str, Any]:
    """Return the object; `left_aside` are sentences about what has no meaning here."""
    parameters = request.parameters
    measured = Measurements.of(request, registry)
    output = request.outputs[0] if request.outputs else None
    fps = output.fps if output else parameters.fps
    frames = output.num_frames if output else parameters.num_frames
    duration_s = round(frames / fps, _DIGITS) if frames and fps else None
    ended = request.finished_at
    ran = None if ended is None or request.started_at is None else ended - request.started_at
    done = request.status is Status.SUCCEEDED
    form = parameters.output_format
    return {
        "id": request.id,
        "object": "video",
        "model": request.model,
        "prompt": parameters.prompt,
        "status": _STATUS.get(request.status, _FAILED),
        "progress": _PERCENT if done else _progress(request),
        "size": f"{parameters.width}x{parameters.height}",
        "seconds": None if duration_s is None else f"{duration_s:g}",
        "quality": "default",
        "created_at": int(request.created_at),
        "completed_at": int(ended) if ended is not None and done else None,
        "expires_at": int(ended + settings.retention_s) if ended is not None else None,
        "error": _error(request),
        "remixed_from_video_id": None,
        "media_type": MEDIA_TYPES[form],
        "file_name": f"{request.id}.{form}",
        "fps": fps,
        "num_frames": frames,
        "duration_s": duration_s,
        "inference_time_s": None if ran is None else round(ran, _DIGITS),
        "stage_durations": measured.stage_durations,
        "peak_memory_mb": measured.peak_memory_mb,
        "metrics": measured.to_json(),
        "warnings": [*request.warnings, *left_aside],
    }


def _progress(request: Request) -> int:
    """Whole percents of the denoising steps; 100 is kept for the finished file."""
    if not request.steps:
        return 0
    return min(_PERCENT - 1, int(_PERCENT * request.step / request.steps))


def _error(request: Request) -> dict[str, str] | None:
    if request.error is not None:
        return {"code": request.error.code, "message": request.error.message}
    if request.status in {Status.CANCELED, Status.EXPIRED}:
        return {"code": request.status.value, "message": f"The video is {request.status.value}."}
    return None
