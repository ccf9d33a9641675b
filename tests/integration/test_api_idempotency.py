"""One key, one request: submits that are sent again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs.settings import Settings
from tests.integration.api_world import (
    Api,
    PlayedReplica,
    body_of,
    error_of,
)
from tests.integration.conftest import ApiOpener


def test_the_same_key_and_body_submit_once(api: Api, replica: PlayedReplica) -> None:
    headers = {"Idempotency-Key": "order 66"}
    first = api.submit(headers, width=64, height=32)
    again = api.client.post(
        "/v1/requests",
        data='{"height": 32,  "prompt": "a red circle", "width": 64}',
        content_type="application/json",
        headers=headers,
    )
    assert (first.status_code, again.status_code) == (202, 200)
    assert body_of(first) == body_of(again)
    other = api.submit(headers, width=32, height=64)
    assert other.status_code == 409
    assert error_of(other)["code"] == "idempotency_key_reused"
    assert error_of(other)["param"] == "Idempotency-Key"


@pytest.mark.parametrize("key", ["", "k" * 256, "sp\u00e9cial"])
def test_a_key_that_is_none_is_refused(api: Api, replica: PlayedReplica, key: str) -> None:
    answer = api.submit({"Idempotency-Key": key})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "Idempotency-Key"


def test_two_apis_with_one_key_at_the_same_instant_submit_once(
    api: Api, replica: PlayedReplica, open_api: ApiOpener, api_settings: Settings
) -> None:
    apis = [api, open_api(api_settings)]
    gate = threading.Barrier(8)

    def submit(number: int):
        gate.wait(10)
        return apis[number % 2].submit({"Idempotency-Key": "one"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [202]
    assert len({body_of(answer)["id"] for answer in answers}) == 1
    assert len(body_of(api.get("/v1/requests"))["data"]) == 1
