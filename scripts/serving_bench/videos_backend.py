"""The OpenAI-compatible video jobs: create, look until it has ended, fetch the file."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import aiohttp

from scripts.serving_bench.http_call import Caller, RequestFailed, pause
from scripts.serving_bench.outcome import MadeOutput, Reply
from scripts.serving_bench.planned_request import PlannedRequest

_ACTIVE: Final = frozenset({"queued", "in_progress"})
_TELL_S: Final = 5.0


class VideosBackend:
    """`POST /v1/videos`, `GET /v1/videos/{id}` and its `/content`."""

    def __init__(self, caller: Caller, model: str, poll_interval_s: float) -> None:
        """Ask for videos of `model`, and look after each every `poll_interval_s` seconds."""
        self._caller = caller
        self._model = model
        self._poll_interval_s = poll_interval_s

    async def run(self, request: PlannedRequest) -> Reply:
        """See `Backend.run`; the latency is as coarse as the time between two looks."""
        form = aiohttp.FormData(default_to_multipart=True)
        for key, value in {
            "model": self._model,
            "prompt": request.prompt,
            **request.parameters,
        }.items():
            form.add_field(key, str(value))
        for path in request.images[:1]:
            form.add_field("input_reference", path.read_bytes(), filename=path.name)
        job = (await self._caller.call("POST", "/v1/videos", data=form)).json
        url = f"/v1/videos/{job['id']}"
        try:
            while job["status"] in _ACTIVE:
                await pause(self._poll_interval_s)
                job = (await self._caller.call("GET", url)).json
            if job["status"] != "completed":
                raise _failure(job)
            answer = await self._caller.call("GET", f"{url}/content")
        except asyncio.CancelledError:
            with suppress(RequestFailed, TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.remove(job["id"])), _TELL_S)
            raise
        if not answer.content:
            raise RequestFailed("empty_output", f"{url}/content is empty")
        return Reply(
            outputs=(MadeOutput("video/mp4", answer.content),),
            request_id=job["id"],
            stage_durations=job.get("stage_durations") or {},
            peak_memory_mb=job.get("peak_memory_mb") or None,
        )

    async def remove(self, request_id: str) -> None:
        """See `Backend.remove`."""
        await self._caller.call("DELETE", f"/v1/videos/{request_id}")


def _failure(job: Any) -> RequestFailed:
    error = job.get("error") or {}
    return RequestFailed(
        str(error.get("code") or job["status"]), error.get("message") or "the job failed"
    )
