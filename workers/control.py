"""Control commands: what the door tells exactly this replica about a request it runs.

They run in Celery's main thread, between messages, so they only set flags. Each is speed and
nothing
more: the record says the same, and the replica reads it at every report of progress.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import control_command

from routing.broker import BEAT_COMMAND, CANCEL_COMMAND, UPDATE_COMMAND
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


@control_command(name=BEAT_COMMAND)
def beat_now(_state: Any) -> dict[str, bool]:
    """Write a heartbeat now, so that a drain or resume shows without delay."""
    current().beat_now()
    return {"ok": True}
