"""One HTTP call of the benchmark; error answers and broken connections become `RequestFailed`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

NO_ANSWER: Final = "no_answer"
_TEXT: Final = 300


@dataclass(frozen=True)
class Answer:
    """Status, headers and body of an answer below 400."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """The body as JSON.

        Raises:
            RequestFailed: It is not.
        """
        try:
            return json.loads(self.content)
        except ValueError:
            raise RequestFailed("not_json", f"the answer is not JSON: {self.text}") from None

    @property
    def text(self) -> str:
        """The beginning of the body."""
        return self.content[:_TEXT].decode("utf-8", errors="replace")


class RequestFailed(Exception):
    """Raised when a request was refused or ended without outputs.

    Attributes:
        code: A word for counting: that of the service's error, or `http_502` and the like.
        message: For people.
        status: HTTP status of the answer; None where there was none.
        retry_after_s: What its Retry-After says.
    """

    def __init__(
        self,
        code: str,
        message: str,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Keep all."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s


class Caller:
    """Makes calls to one service."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        """Call through `session`; every path is put behind `base_url`."""
        self._session = session
        self._base_url = base_url

    async def call(self, method: str, path: str, **options: Any) -> Answer:
        """Make one call; `options` are those of aiohttp, such as json, data and headers.

        Raises:
            RequestFailed: The answer is an error, or there is none.
        """
        url = path if "://" in path else self._base_url + path
        try:
            async with self._session.request(method, url, **options) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{method} {path}: {str(error) or type(error).__name__}"
            raise RequestFailed(NO_ANSWER, reason) from None
        if answer.status >= 400:
            raise _refusal(answer.status, answer.headers, content)
        return Answer(answer.status, answer.headers, content)


def open_session(api_key: str) -> aiohttp.ClientSession:
    """Open a session without aiohttp's limits of 100 connections and 300 seconds."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
    )


async def pause(seconds: float) -> None:
    """Let the other requests go on for so long."""
    await asyncio.sleep(seconds)


def _refusal(status: int, headers: Mapping[str, str], content: bytes) -> RequestFailed:
    code, message = f"http_{status}", content[:_TEXT].decode("utf-8", errors="replace")
    try:
        error = json.loads(content)["error"]
        code, message = str(error.get("code") or code), str(error.get("message") or message)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    wait = headers.get("Retry-After", "")
    return RequestFailed(code, message, status, float(wait) if wait.isdecimal() else None)
