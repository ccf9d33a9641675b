"""Lists of requests: their order, pages and filters, and what a page costs."""

from __future__ import annotations

from typing import Any

from tests.integration.api_world import (
    Api,
    PlayedReplica,
    body_of,
    wrong_fields,
)


def test_requests_are_listed_newest_first_in_pages(api: Api, replica: PlayedReplica) -> None:
    ids = [api.submitted()["id"] for _ in range(5)][::-1]
    first = body_of(api.get("/v1/requests?limit=2"))
    assert first["object"] == "list"
    assert [request["id"] for request in first["data"]] == ids[:2]
    assert first["has_more"] is True
    second = body_of(api.get(f"/v1/requests?limit=3&after={ids[1]}"))
    assert [request["id"] for request in second["data"]] == ids[2:]
    assert second["has_more"] is False
    assert [request["queue_position"] for request in second["data"]] == [3, 2, 1]


def test_lists_are_filtered_by_status_and_model(api: Api, replica: PlayedReplica) -> None:
    ended, waiting = api.submitted()["id"], api.submitted()["id"]
    replica.succeed(replica.claim())

    def listed(query: str) -> list[str]:
        return [request["id"] for request in body_of(api.get(f"/v1/requests?{query}"))["data"]]

    assert listed("status=succeeded") == [ended]
    assert listed("status=queued&model=tiny") == [waiting]
    assert listed("model=other") == []
    assert listed("status=succeeded&model=other") == []
    assert listed(f"status=queued&after={ended}") == []
    assert listed(f"status=succeeded&after={waiting}") == [ended]


def test_a_filtered_page_costs_what_it_shows_not_what_there_is(
    api: Api, replica: PlayedReplica
) -> None:
    old = [api.submitted()["id"] for _ in range(3)]
    for _ in range(120):
        request = api.submitted()["id"]
        api.post(f"/v1/requests/{request}/cancel")

    def reads() -> int:
        stats: Any = api.service.redis.info("commandstats")
        return int(stats["cmdstat_hgetall"]["calls"])

    before = reads()
    page = body_of(api.get("/v1/requests?status=queued&model=tiny&limit=2"))
    assert [request["id"] for request in page["data"]] == old[:0:-1]
    assert page["has_more"] is True
    assert reads() - before <= 3


def test_wrong_queries_are_refused(api: Api, replica: PlayedReplica) -> None:
    answer = api.get("/v1/requests?status=done&limit=0&colour=red")
    assert set(wrong_fields(answer)) == {"status", "limit", "colour"}
    assert set(wrong_fields(api.get("/v1/requests?limit=many"))) == {"limit"}
    assert api.get("/v1/requests?after=req_unknown").status_code == 404
