"""A submitted request, followed to its end with a progress bar on the terminal.

A stream of events that ends early, or a service that is away for a moment, is asked again. Does not
know how a request is made.
"""

from __future__ import annotations

import time
from typing import Any, Final

from tqdm import tqdm

from routing.outcome import TERMINAL
from scripts.door import Door, Event, NoAnswer

_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.5


class FollowedRequest:
    """One request of a door."""

    def __init__(self, door: Door, request: dict[str, Any]) -> None:
        """Follow the request whose object was answered at its submit."""
        self.id: str = request["id"]
        self._door = door
        self._request = request
        self._last = ""

    def to_end(self) -> dict[str, Any]:
        """Return the request's object once it has ended.

        Raises:
            NoAnswer: The service has been away for a minute.
            Refused: The service does not know the request any more.
        """
        steps = self._request["progress"]["steps"]
        with tqdm(total=steps, unit="step", desc=self._words(self._request), leave=True) as bar:
            heard = time.monotonic()
            while self._request["status"] not in TERMINAL:
                try:
                    for event in self._door.events(self.id, self._last):
                        heard = time.monotonic()
                        self._take(event, bar)
                except NoAnswer:
                    if time.monotonic() - heard > _PATIENCE_S:
                        raise
                    time.sleep(_PAUSE_S)
        return self._request

    def _take(self, event: Event, bar: Any) -> None:
        self._last = event.id or self._last
        data = event.data
        match event.name:
            case "queued":
                bar.reset()
                bar.set_description_str(f"waiting, place {data['queue_position']}")
            case "started":
                bar.reset()
                bar.set_description_str(f"running on {data['replica']}")
            case "progress":
                bar.total = data["steps"]
                bar.update(data["step"] - bar.n)
            case name if name in TERMINAL:
                self._request = {**self._request, **data, "status": name}
                if name == "succeeded":
                    bar.update(bar.total - bar.n)
                bar.set_description_str(self._words(self._request))

    @staticmethod
    def _words(request: dict[str, Any]) -> str:
        return f"{request['status']} on {request['replica']}"
