"""Cancels at the worst moments, again and again: what comes after or beside them is never harmed.

The short form runs with the other tests; ``make chaos`` runs the long one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.service import Service
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LONG_FORM = "CHAOS_REQUESTS" in os.environ
ROUNDS = 100 if LONG_FORM else 5
ENDS = 200 if LONG_FORM else 8
STEPS = 24
# Beside others the last bits may round differently, and bytes are what is compared here.
FIELDS: dict[str, Any] = {"seed": 5, "num_inference_steps": STEPS, "deterministic": True}


@pytest.fixture(scope="module", params=["one at a time", "four at a time"])
def replica(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A service of which one replica takes requests, one at a time or four."""
    if request.param == "four at a time":
        yield request.getfixturevalue("roomy")
        return
    service: Service = request.getfixturevalue("service")
    service.call("POST", "/v1/replicas/replica1/drain")
    yield service
    service.call("POST", "/v1/replicas/replica1/resume")


def _reference(replica: Service) -> bytes:
    return replica.output(replica.ended(replica.submit(**FIELDS)["id"])).content


def test_after_a_cancel_in_mid_run_the_same_seed_gives_the_same_bytes(replica: Service) -> None:
    reference = _reference(replica)
    for number in range(ROUNDS):
        first = replica.submit(**{**FIELDS, "num_inference_steps": 400})
        replica.at_step(first["id"], 1 + number % 5)
        replica.call("POST", f"/v1/requests/{first['id']}/cancel")
        second = replica.ended(replica.submit(**FIELDS)["id"])
        assert replica.output(second).content == reference, number
        assert second["attempt"] == 1
        assert replica.ended(first["id"])["status"] == "canceled"
        assert replica.files(first["id"]) == []


def test_a_cancel_just_as_a_request_ends_never_harms_the_next(replica: Service) -> None:
    reference = _reference(replica)
    ends: Counter[str] = Counter()
    for number in range(ENDS):
        first: Any = replica.submit(**FIELDS)
        second = replica.submit(**FIELDS)
        replica.at_step(first["id"], STEPS - number % 4)
        answer = replica.call("POST", f"/v1/requests/{first['id']}/cancel")
        assert answer.status in {200, 202}
        done = replica.ended(second["id"])
        assert (done["status"], done["attempt"]) == ("succeeded", 1), number
        assert replica.output(done).content == reference, number
        first = replica.ended(first["id"])
        ends[first["status"]] += 1
        if answer.status == 200 and first["status"] == "succeeded":
            assert replica.output(first).content == reference
        else:
            # Also where its file was written by then, which goes once its replica hears of it.
            assert first["status"] == "canceled"
            wait_until(lambda i=first["id"]: replica.files(i) == [], 10, "no file")  # type: ignore[misc]
    print(f"\na cancel at the end found {dict(ends)}")  # noqa: T201 - shown by make chaos
