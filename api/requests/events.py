"""The events of a request as server-sent events."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from flask import Response, g
from flask import request as call
from flask_smorest import Blueprint

from api.http.fields import AnswerSchema, text, whole
from api.http.sse import EVENT_CONTENT, KEEP_ALIVE, KEEP_ALIVE_S, event_response, event_text
from api.requests.answers import (
    OUTPUT,
    PROGRESS,
    REQUEST,
    ShownProgress,
    ShownRequest,
    shown_outputs,
    shown_progress,
)
from api.service import Service
from configs.errors import MalformedRequest, NotFound
from routing.changes import Change, Subscription, cursor_order
from routing.request import TERMINAL, Request, Status

_LONGEST_S: Final = 900.0
_RETRY_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class _Claim:
    """Which replica has a request, and at which attempt; its place in the queue if it waits."""

    replica: str
    attempt: int
    queue_position: int | None = None


class _StartedSchema(AnswerSchema):
    replica = text("The replica that has it.")
    attempt = whole("1 for the first.")


class _QueuedSchema(_StartedSchema):
    queue_position = whole("1 for the next.")


class _PreviewSchema(AnswerSchema):
    step = whole("The step after which it was made.")
    image = text("A data URL of a small JPEG.")


@dataclass(frozen=True, slots=True)
class _Preview:
    step: int
    image: str


_STARTED: Final = _StartedSchema()
_QUEUED: Final = _QueuedSchema()
_PREVIEW: Final = _PreviewSchema()


@dataclass(frozen=True, slots=True)
class Event:
    """One event; without a cursor it is not what a client resumes after."""

    name: str
    data: dict[str, Any]
    cursor: str = ""

    @property
    def is_end(self) -> bool:
        """Whether none comes after it."""
        return self.name in TERMINAL

    def to_text(self) -> str:
        """Return it as a client reads it."""
        return event_text(self.name, self.data, self.cursor)


class RequestEvents:
    """The events of one request for one client."""

    def __init__(
        self, service: Service, request_id: str, subscription: Subscription, last: str
    ) -> None:
        """Go on after the event `last`; with none, begin with where the request stands."""
        self._service = service
        self._request_id = request_id
        self._subscription = subscription
        self._cursor = last

    def backlog(self) -> list[Event]:
        """Return what is to be sent first.

        Raises:
            NotFound: The record was removed meanwhile.
            redis.RedisError: Redis did not answer.
        """
        changes = self._service.changes
        if self._cursor:
            missed = changes.since(self._request_id, self._cursor)
            if missed is not None:
                return [event for change in missed for event in self._of_change(change)]
        # Read before the record: a change between the two comes again, and does not get lost.
        self._cursor = changes.newest()
        return list(self._present())

    def text(self, first: list[Event]) -> Iterator[str]:
        """Return the stream: `first`, then what happens, to the request's end."""
        yield f"retry: {_RETRY_MS}\n\n"
        deadline = time.monotonic() + _LONGEST_S
        events = first
        while True:
            for event in events:
                yield event.to_text()
                if event.is_end:
                    return
            if self._service.held_calls.closed or time.monotonic() > deadline:
                return
            if not self._subscription.wait(KEEP_ALIVE_S):
                yield KEEP_ALIVE
            events = self._news()

    def _news(self) -> list[Event]:
        changes = self._subscription.take()
        if changes is None:
            return self.backlog()
        return [event for change in changes for event in self._of_change(change)]

    def _present(self) -> Iterator[Event]:
        """Where the request stands, as the events that would have told so."""
        request = self._service.records.get(self._request_id)
        if request.is_terminal:
            yield from self._end(request, self._cursor)
            return
        if request.status is Status.QUEUED:
            yield Event("queued", self._place(request), self._cursor)
            return
        yield Event("started", _STARTED.dump(request), self._cursor)
        if request.steps:
            yield Event("progress", PROGRESS.dump(shown_progress(request)), self._cursor)

    def _of_change(self, change: Change) -> Iterator[Event]:
        if not _is_later(change.cursor, self._cursor):
            return
        self._cursor = change.cursor
        if change.event == "progress":
            yield Event("progress", _progress(change), change.cursor)
            return
        if change.event == "started":
            claim = _Claim(change.data.get("replica", ""), change.attempt)
            yield Event("started", _STARTED.dump(claim), change.cursor)
            return
        try:
            request = self._service.records.get(self._request_id)
        except NotFound:
            # Removed by its client: the end is all there is to tell.
            yield Event("canceled", {"id": self._request_id}, change.cursor)
            return
        if change.is_end:
            yield from self._end(request, change.cursor)
        elif change.event == "queued":
            yield Event("queued", self._place(request), change.cursor)
        elif change.event == "preview":
            yield from self._preview(change)
        else:
            yield Event(change.event, self._object(request), change.cursor)

    def _end(self, request: Request, cursor: str) -> Iterator[Event]:
        shown = ShownRequest(request, self._service.settings.retention_s)
        for index, output in enumerate(shown_outputs(shown)):
            yield Event("output", {"index": index, **OUTPUT.dump(output)})
        yield Event(request.status.value, self._object(request), cursor)

    def _preview(self, change: Change) -> Iterator[Event]:
        picture = self._service.records.preview(self._request_id)
        if picture is not None:
            shown = _Preview(int(change.data["step"]), f"data:image/jpeg;base64,{picture}")
            yield Event("preview", _PREVIEW.dump(shown), change.cursor)

    def _place(self, request: Request) -> dict[str, Any]:
        position = self._service.records.queue_position(request)
        return dict(_QUEUED.dump(_Claim(request.replica, request.attempt, position)))

    def _object(self, request: Request) -> dict[str, Any]:
        position = self._service.records.queue_position(request)
        shown = ShownRequest(request, self._service.settings.retention_s, position)
        return dict(REQUEST.dump(shown))


def _progress(change: Change) -> dict[str, Any]:
    step_s = change.data.get("step_s")
    step, steps = int(change.data["step"]), int(change.data["steps"])
    return dict(PROGRESS.dump(ShownProgress.at(step, steps, float(step_s) if step_s else None)))


def _is_later(cursor: str, other: str) -> bool:
    return not other or cursor_order(cursor) > cursor_order(other)


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
    service: Service = g.service
    last = _last_seen()
    with ExitStack() as stack:
        request = service.records.get(request_id)
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
            f"{LAST_EVENT_ID} {last[:40]!r} is not the id of an event; send the last one's, or "
            "leave it out.",
            param=LAST_EVENT_ID,
        )
    return last
