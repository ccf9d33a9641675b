"""What a backend is: one way of asking the service for an output and waiting for it."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from scripts.serving_bench.outcome import Reply
from scripts.serving_bench.planned_request import PlannedRequest


class Backend(Protocol):
    """Sends requests and waits for them; keeps nothing of one when it has ended."""

    async def run(self, request: PlannedRequest) -> Reply:
        """Send the request and return once its outputs are here.

        Where this is canceled, the service is told, as far as the backend can.

        Raises:
            RequestFailed: It was refused or ended without outputs.
        """
        ...

    async def remove(self, request_id: str) -> None:
        """Remove what the service keeps of an ended request.

        Raises:
            RequestFailed: It could not.
        """
        ...


def data_urls(paths: Sequence[Path]) -> list[str]:
    """Return the image files as data URLs."""
    urls = []
    for path in paths:
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        urls.append(f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}")
    return urls
