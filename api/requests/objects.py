"""Records as clients see them: requests and replicas as the objects of the contract.

Times are seconds since the epoch, durations seconds. URLs are paths, so that they hold behind any
proxy. Does not read anything itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from api.requests.inputs import all_inputs
from routing.replica import Replica
from routing.request import Output, Request, Status, Webhook

_DIGITS: Final = 3


def request_url(request_id: str) -> str:
    """Return the path of a request."""
    return f"/v1/requests/{request_id}"


def request_object(
    request: Request, queue_position: int | None, retention_s: float
) -> dict[str, Any]:
    """Return a request as clients see it; `queue_position` is 1 for the next in line."""
    url = request_url(request.id)
    return {
        "id": request.id,
        "object": "request",
        "status": request.status.value,
        "model": request.model,
        "task": request.parameters.task,
        "replica": request.replica,
        "attempt": request.attempt,
        "priority": request.priority.value,
        "affinity_key": request.affinity_key or None,
        "queue_position": queue_position,
        "progress": progress_object(request),
        "created_at": _rounded(request.created_at),
        "started_at": _rounded(request.started_at),
        "finished_at": _rounded(request.finished_at),
        "start_by": _rounded(request.start_by),
        "timeout": request.timeout,
        "timings": _timings(request),
        "parameters": _parameters(request),
        "outputs": [
            output_object(request, index, output, retention_s)
            for index, output in enumerate(request.outputs)
        ],
        "warnings": list(request.warnings),
        "error": asdict(request.error) if request.error else None,
        "metadata": dict(request.metadata),
        "webhook": _webhook(request.webhook),
        "urls": {"get": url, "cancel": f"{url}/cancel", "events": f"{url}/events"},
    }


def replica_object(replica: Replica) -> dict[str, Any]:
    """Return a replica as clients see it."""
    beat = replica.heartbeat
    return {
        "name": replica.name,
        "object": "replica",
        "state": replica.state.value,
        "model": beat.model,
        "stage": beat.stage,
        "host": beat.host,
        "pid": beat.pid,
        "devices": list(beat.devices),
        "device_kind": beat.device_kind,
        "capacity": beat.capacity,
        "running": replica.running,
        "waiting": replica.waiting,
        "seconds_per_step": beat.step_s,
        "completed": replica.completed,
        "failed": replica.failed,
        "restarts": replica.restarts,
        "started_at": _rounded(beat.started_at),
        "last_heartbeat_at": _rounded(replica.heartbeat_at),
        "memory_bytes": beat.memory_bytes,
        "device_memory_bytes": beat.device_memory_bytes,
        "error": beat.error,
    }


def list_object(data: Sequence[Any], *, has_more: bool = False) -> dict[str, Any]:
    """Return the one shape of all lists."""
    return {"object": "list", "data": list(data), "has_more": has_more}


def _webhook(webhook: Webhook | None) -> dict[str, Any] | None:
    if webhook is None:
        return None
    return {
        "url": webhook.url,
        "events": list(webhook.events),
        "tries": webhook.tries,
        "delivered_at": _rounded(webhook.delivered_at),
        "error": webhook.error or None,
    }


def _parameters(request: Request) -> dict[str, Any]:
    parameters = request.parameters.to_json()
    urls = [
        f"{request_url(request.id)}/inputs/{index}"
        for index, _ in enumerate(all_inputs(request.parameters))
    ]
    parameters["mask_image"] = urls.pop() if request.parameters.mask_image else None
    parameters["image"] = urls
    return parameters


def progress_object(request: Request) -> dict[str, Any]:
    """Return how far a request is."""
    steps = request.steps or request.parameters.num_inference_steps
    eta = None
    if request.status is Status.RUNNING and request.step_s is not None and request.steps:
        eta = _rounded((steps - request.step) * request.step_s)
    done = request.status is Status.SUCCEEDED
    return {
        "step": request.step,
        "steps": steps,
        "fraction": 1.0 if done else round(request.step / steps, 4),
        "eta_s": eta,
    }


def _timings(request: Request) -> dict[str, float | None]:
    until = request.started_at or request.finished_at
    timings = request.timings
    return {
        "queued_s": _rounded(until - request.created_at) if until else None,
        "encode_s": _rounded(timings.encode_s),
        "denoise_s": _rounded(timings.denoise_s),
        "decode_s": _rounded(timings.decode_s),
        "total_s": _rounded(request.finished_at - request.created_at)
        if request.finished_at
        else None,
        "batch_mean": _rounded(timings.batch_mean),
    }


def output_object(
    request: Request, index: int, output: Output, retention_s: float
) -> dict[str, Any]:
    """Return one output of a request."""
    ended = request.finished_at
    return {
        "url": f"{request_url(request.id)}/outputs/{index}",
        "media_type": output.media_type,
        "width": output.width,
        "height": output.height,
        "seed": output.seed,
        "bytes": output.bytes,
        "num_frames": output.num_frames,
        "fps": output.fps,
        "expires_at": _rounded(ended + retention_s) if ended is not None else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)
