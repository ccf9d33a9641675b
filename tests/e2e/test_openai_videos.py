"""Videos by the `openai` package against real replicas of tiny Wans, and a chat that makes one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from scripts.lab.families import save_family
from tests.e2e.service import Service
from tests.pictures import data_url, picture

MODELS = ("wan", "wan_image_to_video")
SMALL: dict[str, Any] = {"num_frames": 5, "num_inference_steps": 2}
# The client takes only the sizes of one model for right; others are sent all the same.
SIZE: Any = "48x48"


STAGE = """
  - stage_id: {index}
    stage_type: diffusion
    runtime:
      devices: "{index}"
      num_replicas: 1
    engine_args:
      model: {folder}
      served_model_name: {name}
      device: cpu
    default_sampling_params:
      width: 48
      height: 48
      num_frames: 5
      num_inference_steps: 2
"""


@pytest.fixture(scope="module")
def films(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a replica of each of two video models with random weights."""
    folder = tmp_path_factory.mktemp("films")
    stages = [
        STAGE.format(index=index, name=name, folder=save_family(name, folder / name))
        for index, name in enumerate(MODELS)
    ]
    path = folder / "stages.yaml"
    path.write_text("stages:" + "".join(stages))
    running = Service(
        redis_url,
        f"films-{secrets.token_hex(4)}:",
        folder,
        stage_file=path,
        environ={"API_WORKERS": "1"},
    )
    try:
        running.start("replica0", "replica1")
        yield running
    finally:
        running.stop()


@pytest.fixture(params=MODELS)
def film(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a video of one of the models is asked for with."""
    asked: dict[str, Any] = {"model": request.param, "prompt": "a moving cat", "size": SIZE}
    if request.param == "wan_image_to_video":
        asked["input_reference"] = ("first.png", picture(64, 64), "image/png")
    return asked


@pytest.fixture
def client(films: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{films.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_create_poll_download_and_delete(client: openai.OpenAI, film: dict[str, Any]) -> None:
    video = client.videos.create_and_poll(**film, extra_body=SMALL, poll_interval_ms=200)
    assert (video.status, video.progress, video.size) == ("completed", 100, "48x48")
    file = client.videos.download_content(video.id).read()
    assert file[4:8] == b"ftyp"
    assert video.id in [each.id for each in client.videos.list()]
    assert client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)
    with pytest.raises(openai.UnprocessableEntityError):
        client.videos.create(**film, seconds="9999")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_asynchronously(films: Service, film: dict[str, Any]) -> None:
    async def made() -> bytes:
        async with openai.AsyncOpenAI(
            base_url=f"{films.url}/v1", api_key="none", max_retries=0
        ) as client:
            video = await client.videos.create(**film, extra_body=SMALL)
            while video.status not in {"completed", "failed"}:
                await asyncio.sleep(0.2)
                video = await client.videos.retrieve(video.id)
            content = await client.videos.download_content(video.id)
            return await content.aread()

    assert asyncio.run(made())[4:8] == b"ftyp"


def test_a_chat_answers_with_a_video(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="wan_image_to_video",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a moving cat"},
                    {"type": "image_url", "image_url": {"url": data_url(picture(64, 64))}},
                ],
            }
        ],
        extra_body={"width": 48, "height": 48, **SMALL},
    )
    part: Any = (answer.choices[0].message.content or "")[0]
    assert part["type"] == "video_url"
    assert part["video_url"]["url"].startswith("data:video/mp4;base64,")
    assert part["peak_memory_mb"] > 0


def test_a_video_goes_on_without_its_client(films: Service) -> None:
    body = {"model": "wan", "prompt": "a moving cat", **SMALL}
    video = films.call("POST", "/v1/videos", body)
    assert video.status == 200
    assert films.ended(video.json["id"])["status"] == "succeeded"


def test_the_serving_benchmark_gets_its_videos(films: Service) -> None:
    """It submits by a form without a model's name where one is served, polls, fetches, deletes."""

    async def one(session: aiohttp.ClientSession, index: int) -> dict[str, Any]:
        form = aiohttp.FormData()
        for name, value in (
            ("model", "wan"),
            ("prompt", f"Random prompt {index} for benchmarking diffusion models"),
            ("height", "48"),
            ("width", "48"),
            ("num_frames", "5"),
            ("num_inference_steps", "2"),
            ("seed", str(index)),
            ("fps", "8"),
        ):
            form.add_field(name, value)
        url = f"{films.url}/v1/videos"
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
