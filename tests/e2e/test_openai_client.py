"""The `openai` package against a running service, as its users call it."""

from __future__ import annotations

import asyncio
import base64
import io
import urllib.request
from collections.abc import Iterator, Sequence

import openai
import pytest
from openai.types import ImagesResponse
from PIL import Image

from scripts.lab.tiny_model.picture_check import check_picture
from tests.e2e.service import Service
from tests.pictures import picture

RED_CIRCLE = "a red circle on a blue background"
LONG = 300  # steps: some seconds on the bundled model, so that previews come on the way
PNG = ("input.png", picture(64, 64), "image/png")


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def opened(data: str | None) -> Image.Image:
    assert data is not None
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_generate(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        model="tiny",
        prompt=RED_CIRCLE,
        n=2,
        size="64x64",
        extra_body={"seed": 7, "num_inference_steps": 20},
    )
    assert answer.data is not None
    images = [opened(each.b64_json) for each in answer.data]
    assert [image.size for image in images] == [(64, 64), (64, 64)]
    assert check_picture(images[0], RED_CIRCLE).ok
    assert answer.usage is not None
    assert answer.usage.total_tokens == 0
    assert answer.usage.peak_memory_mb > 0  # type: ignore[attr-defined]


def test_formats_and_addresses(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        prompt=RED_CIRCLE, response_format="url", output_format="webp", output_compression=70
    )
    assert answer.data is not None
    url = answer.data[0].url
    assert url is not None
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url, timeout=10) as fetched:
        assert fetched.headers["Content-Type"] == "image/webp"
        assert Image.open(io.BytesIO(fetched.read())).format == "WEBP"


def test_edit_with_and_without_a_mask(client: openai.OpenAI) -> None:
    edited = client.images.edit(
        model="tiny", image=PNG, prompt=RED_CIRCLE, size="auto", extra_body={"seed": 3}
    )
    assert edited.data is not None
    assert opened(edited.data[0].b64_json).size == (64, 64)
    mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (16, 16, 48, 48))
    file = io.BytesIO()
    mask.save(file, "png")
    painted = client.images.edit(
        model="tiny", image=PNG, mask=("mask.png", file.getvalue()), prompt=RED_CIRCLE
    )
    assert painted.data is not None
    image = opened(painted.data[0].b64_json).convert("RGB")
    corner = image.getpixel((2, 2))
    assert isinstance(corner, tuple)
    # What the mask does not open stays as it was: red.
    assert corner[0] > 180
    assert max(corner[1:]) < 90


def test_streams(client: openai.OpenAI) -> None:
    kinds, partial = [], []
    stream = client.images.generate(
        prompt=RED_CIRCLE,
        size="64x64",
        stream=True,
        partial_images=2,
        extra_body={"seed": 7, "num_inference_steps": LONG},
    )
    for event in stream:
        kinds.append(event.type)
        if event.type == "image_generation.partial_image":
            partial.append(event)
        else:
            assert check_picture(opened(event.b64_json), RED_CIRCLE).ok
            assert event.usage.total_tokens == 0
            assert (event.size, event.output_format) == ("64x64", "png")
    assert 1 <= len(partial) <= 2
    assert kinds == ["image_generation.partial_image"] * len(partial) + [
        "image_generation.completed"
    ]
    for index, event in enumerate(partial):
        assert event.partial_image_index == index
        assert opened(event.b64_json).format == "JPEG"
    (edited,) = client.images.edit(image=PNG, prompt=RED_CIRCLE, stream=True)
    assert edited.type == "image_edit.completed"
    assert opened(edited.b64_json).size == (64, 64)


def test_what_goes_wrong_in_a_stream_is_raised(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.images.generate(prompt=RED_CIRCLE, stream=True, partial_images=4)
    assert refused.value.param == "partial_images"
    stream = client.images.generate(
        prompt=RED_CIRCLE,
        stream=True,
        extra_body={"num_inference_steps": LONG, "timeout": 0.01},
    )
    with pytest.raises(openai.APIError) as failed:
        list(stream)
    assert failed.value.code == "timeout"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": RED_CIRCLE}],
        extra_body={"height": 64, "width": 64, "seed": 7},
    )
    part = answer.choices[0].message.content[0]  # type: ignore[index]
    url = part["image_url"]["url"]  # type: ignore[index]
    assert check_picture(opened(url.partition(",")[2]), RED_CIRCLE).ok


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_errors_have_the_classes_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.images.generate(prompt=RED_CIRCLE, n=0)
    assert refused.value.param == "n"
    assert refused.value.code == "invalid_parameter"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            seed=1,
            extra_body={"extra_body": {"seed": 1}},
        )
    with pytest.raises(openai.NotFoundError):
        client.get("/requests/nobody", cast_to=object)
    with pytest.raises(openai.UnprocessableEntityError) as model:
        client.images.generate(prompt=RED_CIRCLE, model="dall-e-2")
    assert model.value.param == "model"


def test_a_stream_asynchronously(service: Service) -> None:
    async def types() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0
        ) as client:
            stream = await client.images.generate(
                prompt=RED_CIRCLE,
                stream=True,
                partial_images=1,
                extra_body={"num_inference_steps": LONG},
            )
            return [event.type async for event in stream]

    assert asyncio.run(types()) == ["image_generation.partial_image", "image_generation.completed"]


def test_asynchronously(service: Service) -> None:
    async def both() -> Sequence[ImagesResponse]:
        async with openai.AsyncOpenAI(
            base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0
        ) as client:
            return await asyncio.gather(
                client.images.generate(prompt=RED_CIRCLE, extra_body={"seed": 1}),
                client.images.edit(prompt=RED_CIRCLE, image=PNG, extra_body={"seed": 1}),
            )

    for answer in asyncio.run(both()):
        assert answer.data is not None
        assert opened(answer.data[0].b64_json).size == (64, 64)
