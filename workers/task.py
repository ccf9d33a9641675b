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
    return {"found": current().cancel(request_id, attempt)}


@control_command(
    name=UPDATE_COMMAND, args=[("request_id", str), ("attempt", int)], signature="<id> <attempt>"
)
def update_request(_state: Any, request_id: str, attempt: int) -> dict[str, bool]:
    """Read the record of a running request again; ``found`` says whether it runs here."""
    return {"found": current().refresh(request_id, attempt)}


@control_command(name=HEARTBEAT_COMMAND)
def heartbeat_now(_state: Any) -> dict[str, bool]:
    """Write a heartbeat now, so that a drain or resume shows without delay."""
    current().heartbeat_now()
    return {"ok": True}


@shared_task(name=RUN_TASK)
def run(request_id: str, attempt: int) -> str | None:
    """Run the first request of the line; its id, or None where nothing waited.

    ``request_id`` and ``attempt`` name the request that caused the wake-up, for whoever reads
    Flower or the logs. Another one may be first in the line by now, by its priority; its own
    wake-up then serves this one.
    """
    del request_id, attempt
    return current().run_next()
