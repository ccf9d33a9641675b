"""A request followed by server-sent events, through a real API and a real replica."""

from __future__ import annotations

import base64
import http.client
import io
import json
from collections.abc import Iterator
from typing import Any

from PIL import Image

from tests.e2e.service import Service
from tests.waiting import wait_until


def followed(service: Service, request_id: str) -> Iterator[tuple[str, Any]]:
    """Yield the events of a request, name and data, to the end of the stream."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request("GET", f"/v1/requests/{request_id}/events")
    try:
        name = ""
        for line in connection.getresponse():
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)
    finally:
        connection.close()


def test_previews_come_while_it_runs_and_the_end_comes_last(service: Service) -> None:
    request = service.submit("a red circle", num_inference_steps=200, preview=True, seed=3)
    events = list(followed(service, request["id"]))
    names = [name for name, _ in events]
    assert names[-2:] == ["output", "succeeded"]
    assert "progress" in names
    previews = [data for name, data in events if name == "preview"]
    assert previews
    kind, _, data = previews[-1]["image"].partition(",")
    assert kind == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (64, 64)
    steps = [data["step"] for name, data in events if name == "progress"]
    assert steps == sorted(steps)
    assert events[-1][1]["outputs"][0]["url"] == service.get(request["id"])["outputs"][0]["url"]


def test_previews_are_off_unless_asked_for_and_can_be_switched_on_late(service: Service) -> None:
    request = service.submit("a red circle", num_inference_steps=900, seed=3)
    service.at_step(request["id"], 5)
    events = followed(service, request["id"])
    assert next(events)[0] == "started"
    changed = service.call("PATCH", f"/v1/requests/{request['id']}", {"preview": True})
    assert changed.json["parameters"]["preview"] is True
    names: list[str] = []

    def seen() -> bool:
        names.append(next(events)[0])
        return names[-1] == "preview"

    wait_until(seen, 60, "a preview")
    assert "preview" not in names[: names.index("edited")]
    service.call("POST", f"/v1/requests/{request['id']}/cancel")
    assert [name for name, _ in events][-1] == "canceled"
