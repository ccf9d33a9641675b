"""The OpenAI-compatible image calls: `/v1/images/generations`, `/v1/images/edits`, and chat.

The service cancels a request of these calls when the connection closes, so that giving one up needs
no call.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import aiohttp

from scripts.serving_bench.backend import data_urls
from scripts.serving_bench.http_call import Answer, Caller, RequestFailed
from scripts.serving_bench.outcome import MadeOutput, Reply
from scripts.serving_bench.planned_request import PlannedRequest

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
        return _reply(outputs, document.get("metrics"), document.get("usage"), document)

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
        return _reply(outputs, *items[:1], document.get("metrics"), document.get("usage"), document)

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


def _reply(outputs: tuple[MadeOutput, ...], *places: Any) -> Reply:
    """Read durations and memory from the first place that has them, as they moved over time."""
    if not outputs or not all(output.content for output in outputs):
        raise RequestFailed("no_output", "the answer holds no output")
    found = [place for place in places if isinstance(place, dict)]
    durations: dict[str, float] = next(
        (p["stage_durations"] for p in found if p.get("stage_durations")), {}
    )
    memory = next((p["peak_memory_mb"] for p in found if p.get("peak_memory_mb")), None)
    return Reply(outputs=outputs, stage_durations=durations, peak_memory_mb=memory)
