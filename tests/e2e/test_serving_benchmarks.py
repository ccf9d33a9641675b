"""The contract with vLLM-Omni's serving benchmark: what it sends, and what it reads of the answers.

It counts a request as completed for a status of exactly 200 and a JSON body; durations and memory
must be numbers, since it adds them up.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from tests.e2e.service import Service
from tests.pictures import picture

WHITE = picture(512, 512, color="white")
PROMPTS = 4
Send = Callable[[aiohttp.ClientSession, str, int], Awaitable[dict[str, Any]]]


def measured(place: dict[str, Any]) -> None:
    """What the client adds up is made of numbers."""
    durations, memory = place["stage_durations"], place["peak_memory_mb"]
    assert durations
    assert all(type(value) in {int, float} for value in durations.values())
    assert type(memory) in {int, float}
    assert memory > 0


async def _json(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    assert answer.status == 200, await answer.text()
    body: dict[str, Any] = await answer.json()
    return body


async def chat(session: aiohttp.ClientSession, url: str, index: int) -> dict[str, Any]:
    prompt = f"Random prompt {index} for benchmarking diffusion models"
    payload = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "extra_body": {"height": 64, "width": 64, "num_inference_steps": 2, "seed": index},
    }
    async with session.post(f"{url}/v1/chat/completions", json=payload) as answer:
        body = await _json(answer)
    measured(body["choices"][0]["message"]["content"][0])
    measured(body["metrics"])
    assert body["peak_memory_mb"] > 0
    return body


async def chat_with_image(session: aiohttp.ClientSession, url: str, index: int) -> dict[str, Any]:
    image = base64.b64encode(WHITE).decode()
    content = [
        {"type": "text", "text": f"Random prompt {index} for benchmarking diffusion models"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
    ]
    payload = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "extra_body": {
            "height": 64,
            "width": 64,
            "num_inference_steps": 4,
            "negative_prompt": f"Negative prompt {index}",
        },
    }
    async with session.post(f"{url}/v1/chat/completions", json=payload) as answer:
        body = await _json(answer)
    measured(body["choices"][0]["message"]["content"][0])
    return body


async def generations(session: aiohttp.ClientSession, url: str, index: int) -> dict[str, Any]:
    payload = {
        "model": "default",
        "prompt": f"Random prompt {index} for benchmarking diffusion models",
        "n": 1,
        "size": "64x64",
        "response_format": "b64_json",
        "num_inference_steps": 2,
        "seed": index,
        "negative_prompt": f"Negative prompt {index}",
    }
    headers = {"Content-Type": "application/json", "Authorization": "Bearer EMPTY"}
    async with session.post(
        f"{url}/v1/images/generations", json=payload, headers=headers
    ) as answer:
        body = await _json(answer)
    assert body["usage"]["peak_memory_mb"] > 0
    return body


async def edits(session: aiohttp.ClientSession, url: str, index: int) -> dict[str, Any]:
    form = aiohttp.FormData()
    for name, value in (
        ("model", "default"),
        ("prompt", f"Random prompt {index} for benchmarking diffusion models"),
        ("size", "64x64"),
        ("response_format", "b64_json"),
        ("num_inference_steps", "4"),
        ("seed", str(index)),
        ("guidance_scale", "2.0"),
        ("negative_prompt", f"Negative prompt {index}"),
        ("bot_task", "think"),
    ):
        form.add_field(name, value)
    form.add_field("image", WHITE, filename="white.png", content_type="image/png")
    async with session.post(f"{url}/v1/images/edits", data=form) as answer:
        return await _json(answer)


@pytest.mark.parametrize("send", [chat, chat_with_image, generations, edits])
def test_all_requests_of_a_benchmark_are_completed(service: Service, send: Send) -> None:
    async def all_at_once() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(
                *(send(session, service.url, index) for index in range(PROMPTS))
            )

    assert len(asyncio.run(all_at_once())) == PROMPTS
