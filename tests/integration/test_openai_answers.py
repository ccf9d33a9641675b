"""What OpenAI's calls answer once a replica has done its part, where their clients look for it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from werkzeug.test import TestResponse

from configs.settings import Settings
from routing.request import Request
from tests.integration.api_world import (
    PIXELS,
    Api,
    PlayedReplica,
    body_of,
    error_of,
)
from tests.integration.image_inputs import EDITING, RED
from tests.integration.spec import Spec
from tests.pictures import data_url
from tests.waiting import wait_until

USER = [{"role": "user", "content": "a red circle"}]
MIB = 1024 * 1024


@pytest.fixture
def editing(api: Api) -> PlayedReplica:
    api.start()
    replica = api.replica().load(EDITING)
    replica.beat(memory_bytes=300 * MIB)
    return replica


@contextmanager
def held(api: Api, send: Callable[[], TestResponse]) -> Iterator[Future[TestResponse]]:
    """A call that waits; where the test fails it is let go."""
    with ThreadPoolExecutor() as pool:
        try:
            yield pool.submit(send)
        except BaseException:
            api.service.held_calls.close()
            raise


def served(
    api: Api,
    replica: PlayedReplica,
    send: Callable[[], TestResponse],
    end: Callable[[Request], None] | None = None,
) -> tuple[TestResponse, Request]:
    """Make a call that waits, play the replica's part, and return the answer and the request."""
    with held(api, send) as call:
        wait_until(
            lambda: call.done() or api.claims.waiting_at(replica.name),
            10,
            "the request",
        )
        assert not call.done(), call.result().get_data(as_text=True)
        request = replica.claim()
        (end or replica.succeed)(request)
        return call.result(timeout=10), request


def post(api: Api, path: str, **body: Any) -> Callable[[], TestResponse]:
    return lambda: api.client.post(path, json=body)


def test_generations(api: Api, editing: PlayedReplica) -> None:
    answer, request = served(
        api,
        editing,
        post(
            api,
            "/v1/images/generations",
            prompt="a red circle",
            model="default",
            n=2,
            size="96x64",
            seed=5,
            user="me",
            quality="hd",
            extra_body={"num_inference_steps": 7},
        ),
    )
    assert answer.status_code == 200
    body = body_of(answer)
    parameters = request.parameters
    assert (parameters.width, parameters.height, parameters.num_inference_steps) == (96, 64, 7)
    assert parameters.num_outputs_per_prompt == 2
    assert [base64.b64decode(each["b64_json"]) for each in body["data"]] == [PIXELS, PIXELS]
    assert [each["seed"] for each in body["data"]] == [5, 6]
    assert [each["url"] for each in body["data"]] == [None, None]
    assert (body["size"], body["output_format"], body["model"]) == ("96x64", "png", "tiny")
    assert body["usage"]["peak_memory_mb"] == 300.0
    assert body["metrics"]["stage_durations"]["denoise"] == 0.5
    assert [line.split()[0] for line in body["warnings"]] == ["quality"]
    assert request.client == "me"


def test_urls_are_absolute_and_lead_to_the_files(api: Api, editing: PlayedReplica) -> None:
    answer, request = served(
        api,
        editing,
        post(
            api,
            "/v1/images/generations",
            prompt="a",
            response_format="url",
            size="",
            model="",
        ),
    )
    url = body_of(answer)["data"][0]["url"]
    assert url == f"http://localhost/v1/requests/{request.id}/outputs/0"
    assert api.get(url).data == PIXELS


@pytest.mark.parametrize("lasts_s", [3600.0, -5.0])
def test_with_a_key_urls_open_without_it_until_they_expire(
    api_settings: Settings, open_api: Callable[[Settings], Api], lasts_s: float
) -> None:
    api = open_api(replace(api_settings, api_key="s3cret", signed_url_s=lasts_s))
    api.start()
    replica = api.replica().load()
    key = {"Authorization": "Bearer s3cret"}
    body = {"prompt": "a", "response_format": "url"}
    answer, request = served(
        api,
        replica,
        lambda: api.client.post("/v1/images/generations", json=body, headers=key),
    )
    url = body_of(answer)["data"][0]["url"]
    fetched = api.get(url)
    if lasts_s > 0:
        assert fetched.data == PIXELS
    else:
        assert (fetched.status_code, error_of(fetched)["param"]) == (401, "expires")
    for other in (
        url.replace("/outputs/0", "/outputs/1"),
        url.replace(f"/{request.id}/outputs/0", f"/{request.id}"),
        url.replace("expires=", "expires=9"),
        url[:-1],
    ):
        refused = api.get(other)
        assert (refused.status_code, error_of(refused)["param"]) == (401, "signature")
    assert api.delete(url.replace("/outputs/0", "")).status_code == 401
    assert api.get(url, Authorization="Bearer s3cret").data == PIXELS


def test_edits_take_files_and_a_mask(api: Api, editing: PlayedReplica) -> None:
    def send() -> TestResponse:
        return api.client.post(
            "/v1/images/edits",
            data={
                "prompt": "a red circle",
                "image": (io.BytesIO(RED), "red.png"),
                "mask": (io.BytesIO(RED), "mask.png"),
                "n": "1",
                "output_format": "jpg",
                "output_compression": "80",
                "bot_task": "think",
            },
            content_type="multipart/form-data",
        )

    answer, request = served(api, editing, send)
    assert answer.status_code == 200
    parameters = request.parameters
    assert (parameters.task, parameters.width, parameters.height) == ("inpaint", 80, 56)
    assert (parameters.output_format, parameters.output_compression) == ("jpeg", 80)
    assert body_of(answer)["warnings"] == ["bot_task has no meaning here and was ignored"]


def test_edits_take_json_as_openai_has_it(api: Api, editing: PlayedReplica) -> None:
    picture = {"image_url": data_url(RED)}
    body = {"prompt": "a", "images": [picture], "mask": picture}
    answer, request = served(
        api,
        editing,
        post(api, "/v1/images/edits", **body, output_format="png", output_compression=100),
    )
    assert answer.status_code == 200
    parameters = request.parameters
    assert (parameters.task, len(parameters.image)) == ("inpaint", 1)
    assert parameters.output_compression is None
    for wrong in ({"images": [{"file_id": "file-1"}]}, {"images": [picture], "image": "x"}):
        assert api.client.post("/v1/images/edits", json={"prompt": "a", **wrong}).status_code == 422


def test_several_images_are_edited_together(api: Api, editing: PlayedReplica) -> None:
    files = [(io.BytesIO(RED), "1.png"), (io.BytesIO(RED), "2.png")]
    answer, request = served(
        api,
        editing,
        lambda: api.client.post(
            "/v1/images/edits",
            data={"prompt": "a", "image[]": files},
            content_type="multipart/form-data",
        ),
    )
    assert answer.status_code == 200
    assert len(request.parameters.image) == 2
    assert request.parameters.task == "image-to-image"


def test_chat(api: Api, editing: PlayedReplica) -> None:
    content = [
        {"type": "text", "text": "a red"},
        {"type": "image_url", "image_url": {"url": data_url(RED)}},
        {"type": "text", "text": "circle"},
    ]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]
    answer, request = served(
        api,
        editing,
        post(
            api,
            "/v1/chat/completions",
            model="tiny",
            messages=messages,
            temperature=0.5,
            store=False,
            tools=[],
            logprobs=False,
            extra_body={"height": 32, "width": 48, "num_outputs_per_prompt": 2, "cfg_scale": None},
        ),
    )
    body = body_of(answer)
    assert request.parameters.prompt == "a red circle"
    named = [line.split()[0] for line in body["warnings"]]
    assert sorted(named) == ["logprobs", "store", "temperature", "tools"]
    assert request.parameters.task == "image-to-image"
    assert body["object"] == "chat.completion"
    parts = body["choices"][0]["message"]["content"]
    assert len(parts) == 2
    for part in parts:
        assert part["type"] == "image_url"
        assert part["image_url"]["url"] == data_url(PIXELS)
        assert part["peak_memory_mb"] == 300.0
        assert set(part["stage_durations"]) == {"queued", "encode", "denoise", "decode", "store"}
        assert all(type(value) is float for value in part["stage_durations"].values())
    for place in (body, body["usage"], body["metrics"]):
        assert place["peak_memory_mb"] == 300.0
    assert body["stage_durations"] == body["metrics"]["stage_durations"]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["choices"][0]["finish_reason"] == "stop"


def test_answers_are_as_the_spec_says(api: Api, editing: PlayedReplica) -> None:
    spec = Spec(body_of(api.get("/openapi.json")))
    path = "/v1/images/generations"
    answer, _ = served(api, editing, post(api, path, prompt="a"))
    schema = spec.answer_schema("post", path, 200)
    assert schema is not None
    assert list(spec.differences(body_of(answer), schema)) == []
    path = "/v1/chat/completions"
    answer, _ = served(api, editing, post(api, path, messages=USER))
    schema = spec.answer_schema("post", path, 200)
    assert schema is not None
    assert [
        line for line in spec.differences(body_of(answer), schema) if "video_url" not in line
    ] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/images/generations", {"prompt": "a"}), ("/v1/chat/completions", {"messages": USER})],
)
def test_ends_other_than_success(
    api: Api, editing: PlayedReplica, path: str, body: dict[str, Any]
) -> None:
    answer, request = served(api, editing, post(api, path, **body), editing.fail)
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "generation_failed"
    assert error_of(answer)["message"] == f"Request {request.id} failed: The pipeline said no."
    assert answer.headers["X-Should-Retry"] == "false"

    answer, _ = served(api, editing, post(api, path, **body), editing.stop)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "canceled")
    assert answer.headers["X-Should-Retry"] == "false"


def recorded(api: Api, request_id: str) -> bool:
    """Whether the record says that the same request may succeed."""
    error = body_of(api.get(f"/v1/requests/{request_id}"))["error"]
    return bool(error["retryable"])


@pytest.mark.parametrize("retryable", [True, False])
@pytest.mark.parametrize("code", ["replica_crashed", "generation_failed", "output_write_failed"])
def test_a_retry_is_advised_where_the_record_says_so(
    api: Api, editing: PlayedReplica, code: str, retryable: bool
) -> None:
    def fail(request: Request) -> None:
        editing.fail(request, code, retryable=retryable)

    call = post(api, "/v1/images/generations", prompt="a")
    answer, request = served(api, editing, call, fail)
    assert (answer.status_code, error_of(answer)["code"]) == (500, code)
    assert recorded(api, request.id) is retryable
    assert answer.headers["X-Should-Retry"] == ("true" if retryable else "false")


def test_a_crash_without_another_attempt_is_not_to_be_retried(
    api_settings: Settings, open_api: Callable[[Settings], Api]
) -> None:
    api = open_api(replace(api_settings, max_attempts=1))
    api.start()
    replica = api.replica().load()

    def crash(request: Request) -> None:
        assert api.claims.move_crashed(request) is None

    call = post(api, "/v1/images/generations", prompt="a")
    answer, request = served(api, replica, call, crash)
    assert (answer.status_code, error_of(answer)["code"]) == (500, "replica_crashed")
    assert recorded(api, request.id) is False
    assert answer.headers["X-Should-Retry"] == "false"


def test_a_request_that_expires_answers_409(api: Api, editing: PlayedReplica) -> None:
    with held(api, post(api, "/v1/images/generations", prompt="a", expires_in=0.01)) as call:
        wait_until(api.claims.expire, 10, "the request to expire")
        answer = call.result(timeout=10)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "expired")
    (request,) = body_of(api.get("/v1/requests"))["data"]
    assert recorded(api, request["id"]) is True
    assert answer.headers["X-Should-Retry"] == "true"


def test_one_key_is_one_request(api: Api, editing: PlayedReplica) -> None:
    def send() -> TestResponse:
        return api.client.post(
            "/v1/images/generations", json={"prompt": "a"}, headers={"Idempotency-Key": "k"}
        )

    first, request = served(api, editing, send)
    again = send()
    assert body_of(again)["id"] == body_of(first)["id"] == request.id


def test_a_closing_api_lets_go_and_cancels(api: Api, editing: PlayedReplica) -> None:
    with held(api, post(api, "/v1/images/generations", prompt="a")) as call:
        wait_until(lambda: api.claims.waiting_at(editing.name), 10, "the request")
        api.service.held_calls.close()
        answer = call.result(timeout=10)
    assert answer.status_code == 503
    assert "Retry-After" in answer.headers
    assert body_of(api.get("/v1/requests"))["data"][0]["status"] == "canceled"


def test_a_chat_in_markdown(api: Api, editing: PlayedReplica) -> None:
    call = post(api, "/v1/chat/completions", messages=USER, content_format="markdown", n=2, seed=5)
    answer, _ = served(api, editing, call)
    content = body_of(answer)["choices"][0]["message"]["content"]
    assert content == f"![seed 5]({data_url(PIXELS)})\n\n![seed 6]({data_url(PIXELS)})"
