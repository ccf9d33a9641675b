"""Server-sent events of one call: their text, and the answer that carries them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from flask import Response, stream_with_context

# Writing is what shows every proxy between, and us, that the connection still stands.
KEEP_ALIVE_S: Final = 10.0
KEEP_ALIVE: Final = ": still here\n\n"
DONE: Final = "data: [DONE]\n\n"
_EVENT_STREAM: Final = "text/event-stream"
_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
EVENT_CONTENT: Final = {
    _EVENT_STREAM: {
        "schema": {
            "type": "object",
            "description": "One event.",
            "required": ["event", "data"],
            "properties": {
                "event": {"type": "string", "description": "What happened."},
                "data": {"type": "string", "description": "A JSON object in one line."},
                "id": {"type": "string", "description": "What to resume after."},
                "retry": {"type": "integer"},
            },
        }
    }
}

CHUNK_CONTENT: Final = {
    _EVENT_STREAM: {
        "schema": {
            "type": "object",
            "description": "One chunk; `[DONE]` is the last.",
            "required": ["data"],
            "properties": {"data": {"type": "string", "description": "A JSON object in one line."}},
        }
    }
}


def event_text(name: str, data: Mapping[str, Any], cursor: str = "") -> str:
    """Return an event as a client reads it; without a cursor it cannot be resumed after."""
    number = f"id: {cursor}\n" if cursor else ""
    return f"{number}event: {name}\ndata: {json.dumps(data)}\n\n"


def data_text(data: Mapping[str, Any]) -> str:
    """Return an event without a name, as OpenAI's chats are told."""
    return f"data: {json.dumps(data)}\n\n"


def event_response(text: Iterator[str], on_close: Callable[[], None]) -> Response:
    """Return the answer that sends `text`; `on_close` is called once it has ended or broken off."""
    response = Response(stream_with_context(text), mimetype=_EVENT_STREAM, headers=_HEADERS)
    response.call_on_close(on_close)
    return response
