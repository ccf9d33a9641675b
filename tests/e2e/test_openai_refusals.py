"""What the `openai` client raises where an API asks for a key, and where the lines are full."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from tests.e2e.service import Service
from tests.waiting import wait_until

KEY = "sesame"
LONG, SOME = 1000, 100  # steps: much more than a test needs, some seconds


@pytest.fixture(scope="module")
def strict(
    service: Service, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """Another API to the same replicas, with a key and lines of one."""
    api = Service(
        redis_url,
        service.redis_prefix,
        tmp_path_factory.mktemp("strict"),
        environ={
            "API_KEY": KEY,
            "API_WORKERS": "1",
            "MAX_WAITING_PER_REPLICA": "1",
            "OUTPUTS_URL": str(service.outputs),
        },
    )
    try:
        api.start_api()
        yield api
    finally:
        api.stop()


def client_of(api: Service, key: str = KEY, max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=max_retries)


@contextmanager
def full_lines(service: Service, steps: int = LONG) -> Iterator[None]:
    """Both replicas busy, and one request waiting for each, as long as the context lasts."""
    ids = [
        service.submit(num_inference_steps=steps, deterministic=True, priority="high")["id"]
        for _ in range(4)
    ]
    try:
        wait_until(lambda: waiting(service) == [1, 1], 20, "full lines")
        yield
    finally:
        for request_id in ids:
            service.call("POST", f"/v1/requests/{request_id}/cancel")


def waiting(service: Service) -> list[int]:
    replicas = service.call("GET", "/v1/replicas").json["data"]
    return [replica["waiting"] for replica in replicas]


def test_a_wrong_key_is_an_authentication_error(strict: Service) -> None:
    with client_of(strict) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
    with client_of(strict, "open") as client:
        for stream in (False, True):
            with pytest.raises(openai.AuthenticationError) as refused:
                client.images.generate(prompt="a red circle", stream=stream)
            assert (refused.value.status_code, refused.value.code) == (401, "unauthorized")
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a red circle"}]
            )

    async def list_models() -> None:
        async with openai.AsyncOpenAI(base_url=f"{strict.url}/v1", api_key="open") as client:
            await client.models.list()

    with pytest.raises(openai.AuthenticationError):
        asyncio.run(list_models())


def test_full_lines_are_a_rate_limit_error(service: Service, strict: Service) -> None:
    with full_lines(service), client_of(strict) as client:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as refused:
                client.images.generate(prompt="a red circle", stream=stream)
            assert (refused.value.status_code, refused.value.code) == (429, "queue_full")
            assert refused.value.type == "rate_limit_error"
            headers = refused.value.response.headers
            assert int(headers["Retry-After"]) >= 1
            assert headers["X-Should-Retry"] == "true"


def test_the_client_comes_back_by_itself_when_there_is_room(
    service: Service, strict: Service
) -> None:
    with full_lines(service, steps=SOME), client_of(strict, max_retries=9) as client:
        answer = client.images.with_raw_response.generate(prompt="a red circle", size="64x64")
    assert answer.retries_taken > 0
    made = answer.parse()
    assert made.data is not None
    assert made.data[0].b64_json
