"""More than the service takes: what is refused leaves nothing behind, what is accepted stays."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from configs.settings import Settings
from tests.integration.api_world import body_of, error_of
from tests.integration.conftest import ApiOpener


def test_a_burst_fills_the_line_to_its_cap_and_not_beyond(
    api_settings: Settings, open_api: ApiOpener
) -> None:
    """Two API processes, two replicas, sixty submits at once, room for ten."""
    settings = replace(api_settings, max_waiting_per_replica=8, max_waiting_per_stage=10)
    apis = [open_api(settings), open_api(settings)]
    for name in ("replica0", "replica1"):
        apis[0].replica(name).load()
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda number: apis[number % 2].submit(), range(60)))
    assert Counter(answer.status_code for answer in answers) == {202: 10, 429: 50}
    for answer in answers:
        if answer.status_code == 429:
            assert error_of(answer)["code"] == "queue_full"
            assert int(answer.headers["Retry-After"]) >= 1
    accepted = {body_of(answer)["id"] for answer in answers if answer.status_code == 202}
    listed = body_of(apis[1].get("/v1/requests?limit=100"))["data"]
    assert {request["id"] for request in listed} == accepted
    redis, prefix = apis[0].service.redis, settings.redis_prefix
    assert len(redis.keys(f"{prefix}request:*")) == 10


def test_a_place_that_becomes_free_is_taken_again(
    api_settings: Settings, open_api: ApiOpener
) -> None:
    api = open_api(replace(api_settings, max_waiting_per_stage=1))
    replica = api.replica().load()
    first = api.submitted()["id"]
    assert api.submit().status_code == 429
    api.post(f"/v1/requests/{first}/cancel")
    api.submitted()
    assert api.submit().status_code == 429
    replica.claim()
    assert api.submit().status_code == 202


def test_the_same_key_is_found_though_the_line_is_full(
    api_settings: Settings, open_api: ApiOpener
) -> None:
    """It asks for nothing new, so there is nothing to refuse."""
    api = open_api(replace(api_settings, max_waiting_per_stage=1))
    api.replica().load()
    headers = {"Idempotency-Key": "mine"}
    first = api.submit(headers)
    again = api.submit(headers)
    assert (first.status_code, again.status_code) == (202, 200)
    assert body_of(first)["id"] == body_of(again)["id"]
