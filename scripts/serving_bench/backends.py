"""The ways of asking the service for an output and waiting for it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import mimetypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from scripts.serving_bench.http_call import NO_ANSWER, Answer, Caller, RequestFailed, pause
from scripts.serving_bench.requests import MadeOutput, PlannedRequest, Reply


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


_HOLD: Final = {"Prefer": "wait=60"}
_ACTIVE: Final = frozenset({"queued", "running"})
_PARTS: Final = ("encode_s", "denoise_s", "decode_s", "store_s")
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


_MEDIA: Final = ("image_url", "video_url")
_SIZE: Final = frozenset({"width", "height"})


class ImagesBackend:
    """`POST /v1/images/generations`, and `/v1/images/edits` for requests with images."""

    def __init__(self, caller: Caller, model: str) -> None:
        """Ask for outputs of `model`."""
        self._caller = caller
        self._model = model

    async def run(self, request: PlannedRequest) -> Reply:
        """See `Backend.run`."""
        given = request.parameters
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt,
            "n": 1,
            "response_format": "b64_json",
            **{name: given[name] for name in given if name not in _SIZE},
        }
        if given.keys() >= _SIZE:
            body["size"] = f"{given['width']}x{given['height']}"
        if request.images:
            answer = await self._caller.call(
                "POST", "/v1/images/edits", data=_form(body, request, "image")
            )
        else:
            answer = await self._caller.call("POST", "/v1/images/generations", json=body)
        document = _document(answer)
        encoded = [item.get("b64_json") for item in document.get("data") or []]
        kind = f"image/{document.get('output_format') or 'png'}"
        outputs = tuple(MadeOutput(kind, _decoded(text)) for text in encoded if text)
        return _images_reply(outputs, document.get("metrics"), document.get("usage"), document)

    async def remove(self, request_id: str) -> None:
        """Nothing: these calls keep nothing that the client could name."""


class ChatBackend:
    """`POST /v1/chat/completions`, as vLLM-Omni's diffusion chat."""

    def __init__(self, caller: Caller, model: str) -> None:
        """Ask for outputs of `model`."""
        self._caller = caller
        self._model = model

    async def run(self, request: PlannedRequest) -> Reply:
        """See `Backend.run`."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": request.prompt}]
        parts += [
            {"type": "image_url", "image_url": {"url": url}} for url in data_urls(request.images)
        ]
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": parts if request.images else request.prompt}],
        }
        if request.parameters:
            body["extra_body"] = dict(request.parameters)
        document = _document(await self._caller.call("POST", "/v1/chat/completions", json=body))
        try:
            content = document["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise RequestFailed("no_output", "the answer has no choices[0].message") from None
        items = content if isinstance(content, list) else []
        urls = [item[kind]["url"] for item in items for kind in _MEDIA if item.get("type") == kind]
        outputs = tuple(_from_data_url(url) for url in urls)
        return _images_reply(
            outputs, *items[:1], document.get("metrics"), document.get("usage"), document
        )

    async def remove(self, request_id: str) -> None:
        """Nothing: these calls keep nothing that the client could name."""


def _form(fields: dict[str, Any], request: PlannedRequest, name: str) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for key, value in fields.items():
        form.add_field(key, str(value))
    for path in request.images:
        form.add_field(name, path.read_bytes(), filename=path.name, content_type="image/png")
    return form


def _document(answer: Answer) -> dict[str, Any]:
    document = answer.json
    if not isinstance(document, dict):
        raise RequestFailed("not_json", "the answer is no JSON object")
    return document


def _from_data_url(url: str) -> MadeOutput:
    head, _, text = url.partition(",")
    return MadeOutput(head.removeprefix("data:").partition(";")[0], _decoded(text))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestFailed("not_base64", "an output is not in base64") from None


def _images_reply(outputs: tuple[MadeOutput, ...], *places: Any) -> Reply:
    """Read durations and memory from the first place that has them, as they moved over time."""
    if not outputs or not all(output.content for output in outputs):
        raise RequestFailed("no_output", "the answer holds no output")
    found = [place for place in places if isinstance(place, dict)]
    durations: dict[str, float] = next(
        (p["stage_durations"] for p in found if p.get("stage_durations")), {}
    )
    memory = next((p["peak_memory_mb"] for p in found if p.get("peak_memory_mb")), None)
    return Reply(outputs=outputs, stage_durations=durations, peak_memory_mb=memory)


_VIDEO_ACTIVE: Final = frozenset({"queued", "in_progress"})


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
            while job["status"] in _VIDEO_ACTIVE:
                await pause(self._poll_interval_s)
                job = (await self._caller.call("GET", url)).json
            if job["status"] != "completed":
                raise _video_failure(job)
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


def _video_failure(job: Any) -> RequestFailed:
    error = job.get("error") or {}
    return RequestFailed(
        str(error.get("code") or job["status"]), error.get("message") or "the job failed"
    )
