"""The client of the API that the commands use, and what they print."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TextIO

from tqdm import tqdm

from routing.request import TERMINAL


def say(line: str) -> None:
    """Print a line at once, also where the output is a file or a pipe."""
    _write(sys.stdout, line)


def complain(line: str) -> None:
    """Print an error; one line, unless the configuration has several errors."""
    _write(sys.stderr, f"Error: {line}")


def _write(stream: TextIO, line: str) -> None:
    # Where the terminal is gone the service goes on, and its logs say the same.
    with suppress(OSError):
        print(line, file=stream, flush=True)


_CALL_S: Final = 15.0


class NoAnswer(Exception):
    """Raised where the API cannot be reached or has no Redis now; a later call may succeed."""


class Refused(Exception):
    """Raised where the API refuses a call, or what answers is not an API of this service."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a request; its id is empty where a stream is not to be resumed after it."""

    name: str
    data: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class ApiClient:
    """The API at ``url``, asked with ``api_key`` unless that is empty."""

    url: str
    api_key: str = ""

    def replicas(self) -> list[dict[str, Any]]:
        """Return all replicas, by number.

        Raises:
            NoAnswer, Refused: See there.
        """
        found: list[dict[str, Any]] = self._call("GET", "/v1/replicas")["data"]
        return found

    def restart(self, name: str, drain_s: float) -> None:
        """Have a replica drain and end; what runs there may take ``drain_s`` seconds more.

        Raises:
            NoAnswer, Refused: See there.
        """
        self._call("POST", f"/v1/replicas/{urllib.parse.quote(name)}/restart?drain_s={drain_s:g}")

    def submit(self, body: Mapping[str, Any], idempotency_key: str) -> dict[str, Any]:
        """Submit a request and return its object; with the same key again, the same one.

        Raises:
            NoAnswer, Refused: See there.
        """
        headers = {"Idempotency-Key": idempotency_key, "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request: dict[str, Any] = self._call("POST", "/v1/requests", data, headers)
        return request

    def request(self, request_id: str, wait_s: int = 0) -> dict[str, Any]:
        """Return a request, once it has ended or after ``wait_s`` seconds, 10 at most.

        Raises:
            NoAnswer, Refused: See there.
        """
        headers = {"Prefer": f"wait={wait_s}"}
        request: dict[str, Any] = self._call("GET", f"/v1/requests/{request_id}", headers=headers)
        return request

    def cancel(self, request_id: str) -> dict[str, Any]:
        """Cancel a request and return its object.

        Raises:
            NoAnswer, Refused: See there.
        """
        request: dict[str, Any] = self._call("POST", f"/v1/requests/{request_id}/cancel")
        return request

    def events(self, request_id: str, last: str = "") -> Iterator[StreamEvent]:
        """Yield the events of a request after the one with the id ``last``.

        The stream may end before the request does: ask again from the last event on.

        Raises:
            NoAnswer, Refused: See there.
        """
        headers = {"Last-Event-ID": last} if last else {}
        with self._open("GET", f"/v1/requests/{request_id}/events", None, headers) as answer:
            name, number = "", ""
            for raw in answer:
                field, _, value = raw.decode().rstrip("\n").partition(": ")
                if field == "id":
                    number = value
                elif field == "event":
                    name = value
                elif field == "data":
                    yield StreamEvent(name, json.loads(value), number)
                    number = ""

    def file(self, path: str) -> bytes:
        """Return the bytes of an output.

        Raises:
            NoAnswer, Refused: See there.
        """
        with self._open("GET", path, None, {}) as answer:
            data: bytes = answer.read()
            return data

    def _call(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        with self._open(method, path, data, headers or {}) as answer:
            try:
                return json.load(answer)
            except ValueError as error:
                raise Refused(f"{self.url} is not an API of this service: {error}") from error

    @contextmanager
    def _open(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[Any]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            request = urllib.request.Request(  # noqa: S310
                self.url + path, data=data, headers={**headers, **key}, method=method
            )
            with urllib.request.urlopen(request, timeout=_CALL_S) as answer:  # noqa: S310
                yield answer
        except urllib.error.HTTPError as error:
            message = _message(error)
            if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise NoAnswer(message) from error
            raise Refused(message) from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"{self.url} does not answer: {error}") from error


def _message(error: urllib.error.HTTPError) -> str:
    """What an answer says went wrong: our own words where it is ours."""
    try:
        message: str = json.load(error)["error"]["message"]
    except (ValueError, LookupError, TypeError, OSError):
        return f"{error.url} answers {error.code} {error.reason}"
    return message


_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.5


class FollowedRequest:
    """One request, followed by its events until it ends."""

    def __init__(self, api: ApiClient, request: dict[str, Any]) -> None:
        """Follow the request whose object was answered at its submit."""
        self.id: str = request["id"]
        self._api = api
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
                    for event in self._api.events(self.id, self._last):
                        heard = time.monotonic()
                        self._take(event, bar)
                except NoAnswer:
                    if time.monotonic() - heard > _PATIENCE_S:
                        raise
                    time.sleep(_PAUSE_S)
        return self._request

    def _take(self, event: StreamEvent, bar: Any) -> None:
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
