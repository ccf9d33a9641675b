"""The native calls: submit, wait without asking again and again, fetch the outputs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from scripts.serving_bench.backend import data_urls
from scripts.serving_bench.http_call import NO_ANSWER, Caller, RequestFailed, pause
from scripts.serving_bench.outcome import MadeOutput, Reply
from scripts.serving_bench.planned_request import PlannedRequest

_HOLD: Final = {"Prefer": "wait=60"}
_ACTIVE: Final = frozenset({"queued", "running"})
_PARTS: Final = ("encode_s", "denoise_s", "decode_s")
_LOOK_AGAIN_S: Final = 0.5
_LOST_LOOKS: Final = 20
_TELL_S: Final = 5.0


class NativeBackend:
    """`POST /v1/requests`, then `GET` with `Prefer: wait`."""

    def __init__(self, caller: Caller, model: str) -> None:
        """Ask for outputs of `model`."""
        self._caller = caller
        self._model = model

    async def run(self, request: PlannedRequest) -> Reply:
        """See `Backend.run`."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt,
            "metadata": {"sent_by": "diffusion_benchmark_serving"},
            **request.parameters,
        }
        if request.images:
            urls = data_urls(request.images)
            body["image"] = urls[0] if len(urls) == 1 else urls
        # Not held: the id must be known at once, or a request given up could not be canceled.
        submitted = (await self._caller.call("POST", "/v1/requests", json=body)).json
        try:
            ended = await self._ended(submitted)
            if ended["status"] != "succeeded":
                raise _failure(ended)
            return _reply(ended, [await self._output(output) for output in ended["outputs"]])
        except asyncio.CancelledError:
            await self._cancel(submitted["id"])
            raise

    async def remove(self, request_id: str) -> None:
        """See `Backend.remove`."""
        await self._caller.call("DELETE", f"/v1/requests/{request_id}")

    async def _ended(self, request: Any) -> Any:
        """Wait for the end; a look that got lost, or that cannot be held now, is made again."""
        lost = 0
        while request["status"] in _ACTIVE:
            try:
                answer = await self._caller.call("GET", request["urls"]["get"], headers=_HOLD)
                request, lost = answer.json, 0
            except RequestFailed as failed:
                if failed.code == NO_ANSWER:
                    lost += 1
                elif failed.status not in {429, 503}:
                    raise
                if lost > _LOST_LOOKS:
                    raise
                await pause(failed.retry_after_s or _LOOK_AGAIN_S)
        return request

    async def _output(self, output: Any) -> MadeOutput:
        answer = await self._caller.call("GET", output["url"])
        if not answer.content:
            raise RequestFailed("empty_output", f"{output['url']} is empty")
        return MadeOutput(output["media_type"], answer.content)

    async def _cancel(self, request_id: str) -> None:
        """Tell the service that nobody waits any more; the replica stops at its next step."""
        with suppress(RequestFailed, TimeoutError):
            call = self._caller.call("POST", f"/v1/requests/{request_id}/cancel")
            await asyncio.wait_for(asyncio.shield(call), _TELL_S)


def _failure(ended: Any) -> RequestFailed:
    error = ended.get("error") or {}
    return RequestFailed(
        error.get("code") or ended["status"], error.get("message") or f"it is {ended['status']}"
    )


def _reply(ended: Any, outputs: list[MadeOutput]) -> Reply:
    timings = ended.get("timings") or {}
    started, finished = ended.get("started_at"), ended.get("finished_at")
    return Reply(
        outputs=tuple(outputs),
        request_id=ended["id"],
        replica=ended.get("replica"),
        attempt=ended.get("attempt") or 1,
        queued_s=timings.get("queued_s"),
        run_s=finished - started if started and finished else None,
        started_at=started,
        batch_mean=timings.get("batch_mean"),
        stage_durations={
            part.removesuffix("_s"): timings[part]
            for part in _PARTS
            if timings.get(part) is not None
        },
    )
