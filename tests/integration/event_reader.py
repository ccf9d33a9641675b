"""A client of server-sent events: an open answer, read event by event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from werkzeug.test import TestResponse


@dataclass(frozen=True)
class Seen:
    """One event as a client sees it."""

    name: str
    data: dict[str, Any]
    id: str


class EventReader:
    """An open call that is read event by event."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines

    def next(self) -> Seen:
        fields: dict[str, str] = {}
        for line in self._lines:
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value
            elif not line and fields.get("data") == "[DONE]":
                return Seen("[DONE]", {}, "")
            elif not line and "data" in fields:
                return Seen(
                    fields.get("event", ""), json.loads(fields["data"]), fields.get("id", "")
                )
        raise EOFError("the stream has ended")

    def rest(self) -> list[Seen]:
        seen = []
        while True:
            try:
                seen.append(self.next())
            except EOFError:
                return seen


@contextmanager
def reading(answer: TestResponse) -> Iterator[EventReader]:
    """Read an answer that is a stream; a client that leaves the context has gone."""
    assert answer.status_code == 200, answer.get_data(as_text=True)
    assert answer.mimetype == "text/event-stream"

    def lines() -> Iterator[str]:
        text = ""
        for chunk in answer.response:
            text += chunk.decode() if isinstance(chunk, bytes) else chunk
            *whole, text = text.split("\n")
            yield from whole

    try:
        yield EventReader(lines())
    finally:
        answer.close()
