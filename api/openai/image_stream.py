"""Pictures as a stream of events: some previews while they are made, then the pictures themselves.

The names are those of OpenAI's API.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from api.errors import error_event
from api.http.sse import KEEP_ALIVE, KEEP_ALIVE_S, event_text
from api.openai.objects import (
    COMPLETED,
    IN_EACH_EVENT,
    PARTIAL,
    CompletedImage,
    PartialImage,
    ShownImages,
    size_of,
)
from api.openai.sync import AwaitedRequest, ClientGone
from routing.request import Request


@dataclass(slots=True)
class Spread:
    """Picks out of the previews of a run as many as are wanted, evenly over its steps.

    With `most` of them the first comes when 1 / (`most` + 1) of the steps are done, and so on. A
    preview that comes late stands for all that were due; what starts anew shows nothing twice.
    """

    most: int
    _due: int = 0

    def picks(self, step: int, steps: int) -> bool:
        """Whether the preview after `step` of `steps` is one of them."""
        due = min(self.most, step * (self.most + 1) // steps) if steps else 0
        if due <= self._due:
            return False
        self._due = due
        return True


class PreviewsOfRun:
    """The previews of a request that are due, until it has ended."""

    def __init__(self, waiting: AwaitedRequest, most: int) -> None:
        """Watch a request, and show `most` of its previews."""
        self._waiting = waiting
        self._spread = Spread(most)
        self._steps = 0

    def until_end(self) -> Iterator[str | None]:
        """Yield each preview in base64, and None where the connection was quiet for long.

        Raises:
            ClientGone, Unavailable, redis.RedisError: As :meth:`AwaitedRequest.look`.
        """
        told_at = time.monotonic()
        while not self._waiting.look(KEEP_ALIVE_S):
            picture = self._newest()
            if picture is None and time.monotonic() - told_at < KEEP_ALIVE_S:
                continue
            yield picture
            told_at = time.monotonic()

    def _newest(self) -> str | None:
        step = self._shown_step()
        if step is None or not self._spread.picks(step, self._steps):
            return None
        return self._waiting.service.records.preview(self._waiting.request.id)

    def _shown_step(self) -> int | None:
        """The step of the newest preview that was told of since the last look."""
        request = self._waiting.request
        self._steps = self._steps or request.steps
        changes = self._waiting.subscription.take()
        if changes is None:
            # What was missed may have been one.
            return request.step
        shown = None
        for change in changes:
            if change.event == "progress":
                self._steps = int(change.data["steps"])
            elif change.event == "preview":
                shown = int(change.data["step"])
        return shown


class ImageStream:
    """The events of one call that makes pictures."""

    def __init__(
        self,
        waiting: AwaitedRequest,
        kind: str,
        partial_images: int,
        quality: str,
        completed: Callable[[Request], ShownImages],
    ) -> None:
        """Tell of a request.

        Args:
            waiting: The request.
            kind: What the names of the events begin with.
            partial_images: How many previews are sent at most.
            quality: What all events say of it.
            completed: Makes the answer once the pictures are there.
        """
        self._waiting = waiting
        self._kind = kind
        self._previews = PreviewsOfRun(waiting, partial_images)
        self._quality = quality
        self._completed = completed
        self._sent = 0

    def text(self) -> Iterator[str]:
        """Return the stream; what goes wrong is its last event, since its status is sent."""
        # The client learns at once that it was accepted, however long the queue is.
        yield KEEP_ALIVE
        try:
            for picture in self._previews.until_end():
                yield KEEP_ALIVE if picture is None else self._partial(picture)
            request = self._waiting.until_success()
            yield from self._finished(self._completed(request))
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - logged there; a stream that breaks off says nothing
            yield event_text("error", error_event(error))

    def _finished(self, answer: ShownImages) -> Iterator[str]:
        alike = IN_EACH_EVENT.dump(answer)
        name = f"{self._kind}.completed"
        for index, image in enumerate(answer.data):
            event = CompletedImage(name, self._quality, index, image, answer.created)
            yield event_text(name, {**COMPLETED.dump(event), **alike})

    def _partial(self, picture: str) -> str:
        event = PartialImage(
            f"{self._kind}.partial_image",
            self._quality,
            self._sent,
            picture,
            int(time.time()),
            size_of(self._waiting.request),
        )
        self._sent += 1
        return event_text(event.type, PARTIAL.dump(event))
