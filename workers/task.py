"""The Celery task that runs the next request, and the control commands for one that runs."""

from __future__ import annotations

from typing import Any

from celery import shared_task
from celery.worker.control import control_command

from routing.broker import CANCEL_COMMAND, HEARTBEAT_COMMAND, RUN_TASK, UPDATE_COMMAND
from workers.replica import current


@control_command(
    name=CANCEL_COMMAND, args=[("request_id", str), ("attempt", int)], signature="<id> <attempt>"
)
def cancel_request(_state: Any, request_id: str, attempt: int) -> dict[str, bool]:
    """Stop a running request at its next step; ``found`` says whether it runs here."""
    runner = current().runner
    return {"found": runner is not None and runner.cancel(request_id, attempt)}


@control_command(
    name=UPDATE_COMMAND, args=[("request_id", str), ("attempt", int)], signature="<id> <attempt>"
)
def update_request(_state: Any, request_id: str, attempt: int) -> dict[str, bool]:
    """Read the record of a running request again; ``found`` says whether it runs here."""
    runner = current().runner
    return {"found": runner is not None and runner.refresh(request_id, attempt)}


@control_command(name=HEARTBEAT_COMMAND)
def heartbeat_now(_state: Any) -> dict[str, bool]:
    """Send a heartbeat now, so that a drain or resume shows without delay."""
    current().heartbeats.send_now()
    return {"ok": True}


@shared_task(name=RUN_TASK)
def run(request_id: str, attempt: int) -> str | None:
    """Run the first request of the queue; return its id, or None where nothing waited.

    ``request_id`` and ``attempt`` name the request that caused the wake-up, for whoever reads
    Flower or the logs. Another one may be first by now, by its priority; its own wake-up then
    serves this one.
    """
    del request_id, attempt
    runner = current().runner
    return runner.run_next() if runner is not None else None
