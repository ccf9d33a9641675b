"""The call that follows a request: its events, one by one, as server-sent events.

The stream begins with where the request stands, or goes on after the event that `Last-Event-ID`
names, and ends by itself after the request's end. Does not know what the events are
(`api/request_events.py`).
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Final

from flask import Response
from flask import request as call
from flask_smorest import Blueprint

from api.event_stream import EVENT_CONTENT, event_response
from api.request_events import RequestEvents
from api.service import current_service
from configs.errors import MalformedRequest

LAST_EVENT_ID: Final = "Last-Event-ID"
_CURSOR: Final = re.compile(r"[0-9]{1,19}-[0-9]{1,19}\Z")
_LAST_SEEN: Final = {
    "in": "header",
    "name": LAST_EVENT_ID,
    "schema": {"type": "string", "example": "1790000000000-0"},
    "description": "The id of the last event that was seen: the stream goes on after it.",
}

blueprint = Blueprint("events", __name__, description="Follow a request without asking again.")


@blueprint.route("/v1/requests/<request_id>/events", methods=["GET"])
@blueprint.doc(
    parameters=[_LAST_SEEN],
    responses={
        200: {
            "description": "Events `queued`, `started`, `progress`, `preview`, `edited`, "
            "`canceling` and `output`, then one of `succeeded`, `failed`, `canceled`, `expired`; "
            "the data of each is a JSON object. It ends after that, or after 15 minutes.",
            "content": EVENT_CONTENT,
        }
    },
)
@blueprint.alt_response(204, description="It has ended, and the last event was seen.", success=True)
def follow(request_id: str) -> Response:
    """Follow a request by server-sent events."""
    service = current_service()
    last = _last_seen()
    with ExitStack() as stack:
        request = service.router.store.get(request_id)
        subscription = stack.enter_context(service.held_calls.hold(request_id, only_end=False))
        events = RequestEvents(service, request.id, subscription, last)
        first = events.backlog()
        if last and not first and request.is_terminal:
            return Response(status=204)
        # The call is held for as long as the client reads, and let go when it has gone.
        return event_response(events.text(first), stack.pop_all().close)


def _last_seen() -> str:
    last = call.headers.get(LAST_EVENT_ID, "").strip()
    if last and not _CURSOR.match(last):
        raise MalformedRequest(
            f"{LAST_EVENT_ID} {last[:40]!r} is no id of an event; send the last one's, or none.",
            param=LAST_EVENT_ID,
        )
    return last
