"""Videos by the `openai` package against a real replica, and a chat that makes one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from tests.e2e.service import Service
from tests.pictures import data_url, picture

SMALL: dict[str, Any] = {"num_frames": 9, "num_inference_steps": 2}
# The client takes only the sizes of one model for right; others are sent all the same.
SIZE: Any = "64x64"


@pytest.fixture(params=["of a text", "of an image"])
def asked(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a video is asked for with."""
    asked: dict[str, Any] = {"model": "film", "prompt": "a moving cat", "size": SIZE}
    if request.param == "of an image":
        asked["input_reference"] = ("first.png", picture(64, 64), "image/png")
    return asked


@pytest.fixture
def client(film: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{film.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_create_poll_download_and_delete(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    video = client.videos.create_and_poll(**asked, extra_body=SMALL, poll_interval_ms=200)
    assert (video.status, video.progress, video.size) == ("completed", 100, "64x64")
    file = client.videos.download_content(video.id).read()
    assert file[4:8] == b"ftyp"
    assert video.id in [each.id for each in client.videos.list()]
    assert client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)
    with pytest.raises(openai.UnprocessableEntityError):
        client.videos.create(**asked, seconds="9999")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_asynchronously(film: Service, asked: dict[str, Any]) -> None:
    async def made() -> bytes:
        async with openai.AsyncOpenAI(
            base_url=f"{film.url}/v1", api_key="none", max_retries=0
        ) as client:
            video = await client.videos.create(**asked, extra_body=SMALL)
            while video.status not in {"completed", "failed"}:
                await asyncio.sleep(0.2)
                video = await client.videos.retrieve(video.id)
            content = await client.videos.download_content(video.id)
            return await content.aread()

    assert asyncio.run(made())[4:8] == b"ftyp"


def test_a_chat_answers_with_a_video(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="film",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a moving cat"},
                    {"type": "image_url", "image_url": {"url": data_url(picture(64, 64))}},
                ],
            }
        ],
        extra_body={"width": 64, "height": 64, **SMALL},
    )
    part: Any = (answer.choices[0].message.content or "")[0]
    assert part["type"] == "video_url"
    assert part["video_url"]["url"].startswith("data:video/mp4;base64,")
    assert part["peak_memory_mb"] > 0


def test_a_video_goes_on_without_its_client(film: Service) -> None:
    body = {"model": "film", "prompt": "a moving cat", **SMALL}
    video = film.call("POST", "/v1/videos", body)
    assert video.status == 200
    assert film.ended(video.json["id"])["status"] == "succeeded"


def test_the_serving_benchmark_gets_its_videos(film: Service) -> None:
    """It submits by a form without a model's name where one is served, polls, fetches, deletes."""

    async def one(session: aiohttp.ClientSession, index: int) -> dict[str, Any]:
        form = aiohttp.FormData()
        for name, value in (
            ("model", "film"),
            ("prompt", f"Random prompt {index} for benchmarking diffusion models"),
            ("height", "64"),
            ("width", "64"),
            ("num_frames", "9"),
            ("num_inference_steps", "2"),
            ("seed", str(index)),
            ("fps", "8"),
        ):
            form.add_field(name, value)
        url = f"{film.url}/v1/videos"
        async with session.post(url, data=form) as answer:
            assert answer.status == 200, await answer.text()
            job = await answer.json()
        while job["status"] not in {"completed", "failed"}:
            await asyncio.sleep(0.2)
            async with session.get(f"{url}/{job['id']}") as answer:
                assert answer.status == 200
                job = await answer.json()
        async with session.get(f"{url}/{job['id']}/content") as answer:
            assert answer.status == 200
            assert len(await answer.read()) > 0
        async with session.delete(f"{url}/{job['id']}"):
            pass
        found: dict[str, Any] = job
        return found

    async def all_at_once() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(one(session, index) for index in range(3)))

    for job in asyncio.run(all_at_once()):
        assert job["status"] == "completed"
        assert job["peak_memory_mb"] > 0
        assert all(type(value) in {int, float} for value in job["stage_durations"].values())
