"""A chat as a stream of OpenAI's chunks: the outputs come in one at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from api.errors import error_event
from api.http.sse import DONE, KEEP_ALIVE, data_text
from api.openai.chat_objects import ChatAnswerSchema, ShownChat
from api.openai.image_stream import PreviewsOfRun
from api.openai.sync import AwaitedRequest, ClientGone
from routing.request import Request

_ANSWER: Final = ChatAnswerSchema()
# What the answer of a call that waits says of all its outputs stands in the last chunk.
_AT_THE_END: Final = ("usage", "metrics", "stage_durations", "peak_memory_mb", "warnings")


class ChatStream:
    """The chunks of one chat."""

    def __init__(
        self,
        waiting: AwaitedRequest,
        partial_images: int,
        completed: Callable[[Request], ShownChat],
        *,
        include_usage: bool,
    ) -> None:
        """Tell of a request.

        Args:
            waiting: The request.
            partial_images: How many previews are sent at most.
            completed: Makes the answer once the outputs are there.
            include_usage: Whether a chunk with the usage follows.
        """
        self._waiting = waiting
        self._previews = PreviewsOfRun(waiting, partial_images)
        self._completed = completed
        self._include_usage = include_usage
        self._created = int(time.time())

    def text(self) -> Iterator[str]:
        """Return the stream; what goes wrong is its last event, since its status is sent."""
        yield self._delta({"role": "assistant", "content": ""})
        try:
            for picture in self._previews.until_end():
                yield KEEP_ALIVE if picture is None else self._preview(picture)
            request = self._waiting.until_success()
            yield from self._finished(self._completed(request))
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - logged there; a stream that breaks off says nothing
            # OpenAI's clients look for `error` in events without a name.
            yield data_text({"error": error_event(error)["error"]})
        yield DONE

    def _finished(self, answer: ShownChat) -> Iterator[str]:
        dumped = _ANSWER.dump(answer)
        yield self._delta({"content": dumped["choices"][0]["message"]["content"]})
        more = {name: dumped[name] for name in _AT_THE_END if name in dumped}
        yield self._delta({}, "stop", **more)
        if self._include_usage:
            yield self._chunk([], usage=dumped["usage"])

    def _preview(self, picture: str) -> str:
        # Not in `content`: clients add its pieces up.
        url = f"data:image/jpeg;base64,{picture}"
        return self._delta({"preview": {"type": "image_url", "image_url": {"url": url}}})

    def _delta(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": finish}], **more)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        request = self._waiting.request
        return data_text(
            {
                "id": request.id,
                "object": "chat.completion.chunk",
                "created": self._created,
                "model": request.model,
                "choices": choices,
                **more,
            }
        )
