"""The API as a script sees it: the few calls for replicas, over HTTP.

Does not know what is done with the answers.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

_CALL_S: Final = 15.0


class NoAnswer(Exception):
    """Raised where the API can not be reached or has no Redis now; a later call may succeed."""


class Refused(Exception):
    """Raised where the API refuses a call, or what answers is no such API."""


@dataclass(frozen=True, slots=True)
class Door:
    """The API at ``url``, asked with ``api_key`` unless that is empty."""

    url: str
    api_key: str = ""

    def replicas(self) -> list[dict[str, Any]]:
        """Return all replicas, by number.

        Raises:
            NoAnswer, Refused: As said there.
        """
        found: list[dict[str, Any]] = self._call("GET", "/v1/replicas")["data"]
        return found

    def restart(self, name: str, drain_s: float) -> None:
        """Have a replica drain and end; what runs there may take ``drain_s`` seconds more.

        Raises:
            NoAnswer, Refused: As said there.
        """
        self._call("POST", f"/v1/replicas/{urllib.parse.quote(name)}/restart?drain_s={drain_s:g}")

    def _call(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            request = urllib.request.Request(self.url + path, headers=headers, method=method)  # noqa: S310
            with urllib.request.urlopen(request, timeout=_CALL_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            message = _message(error)
            if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise NoAnswer(message) from error
            raise Refused(message) from error
        except OSError as error:
            raise NoAnswer(f"{self.url} does not answer: {error}") from error
        except ValueError as error:
            raise Refused(f"{self.url} is no API of this service: {error}") from error


def _message(error: urllib.error.HTTPError) -> str:
    """What an answer says went wrong: our own words where it is ours."""
    try:
        message: str = json.load(error)["error"]["message"]
    except (ValueError, LookupError, TypeError, OSError):
        return f"{error.url} answers {error.code} {error.reason}"
    return message
