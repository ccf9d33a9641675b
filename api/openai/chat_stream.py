"""A chat as a stream of chunks: comments while it waits, then one chunk with what was made.

Chunks and errors are as OpenAI sends them; the pictures stand in the text as Markdown, since the
content of a chunk is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from api.errors import error_event
from api.http.sse import KEEP_ALIVE, KEEP_ALIVE_S
from api.openai.sync import AwaitedRequest, ClientGone
from routing.request import Request

CHUNK_CONTENT: Final = {
    "text/event-stream": {
        "schema": {
            "type": "string",
            "description": "Lines `data: {chat.completion.chunk}`, the last one `data: [DONE]`.",
        }
    }
}
_DONE: Final = "data: [DONE]\n\n"


def chunks(
    waiting: AwaitedRequest, completed: Callable[[Request], tuple[str, Mapping[str, Any]]]
) -> Iterator[str]:
    """Return the stream; what goes wrong is told in it, since its status is sent.

    Args:
        waiting: The request.
        completed: Makes the text, and what the chunks say besides, once the outputs are there.
    """
    # The client learns at once that it was accepted, however long the queue is.
    yield KEEP_ALIVE
    try:
        while not waiting.look(KEEP_ALIVE_S):
            yield KEEP_ALIVE
        content, besides = completed(waiting.until_success())
        yield _chunk(besides, {"role": "assistant", "content": content}, None)
        yield _chunk(besides, {}, "stop")
    except ClientGone:
        return
    except Exception as error:  # noqa: BLE001 - logged there; a stream that breaks off says nothing
        yield _data({"error": error_event(error)["error"]})
    yield _DONE


def _chunk(besides: Mapping[str, Any], delta: Mapping[str, str], reason: str | None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return _data({**besides, "object": "chat.completion.chunk", "choices": [choice]})


def _data(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
