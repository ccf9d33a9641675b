"""Cancels at the worst moments, again and again: what comes after or beside them is never harmed.

The short form runs with the other tests; ``make chaos`` runs the long one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from configs.settings import REPOSITORY
from tests.e2e.service import Service
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LONG_FORM = "CHAOS_REQUESTS" in os.environ
ROUNDS = 100 if LONG_FORM else 5
ENDS = 200 if LONG_FORM else 8
STEPS = 24
MODELS = ("one", "four")
# Beside others the last bits may round differently, and bytes are what is compared here.
FIELDS: dict[str, Any] = {"seed": 5, "num_inference_steps": STEPS, "deterministic": True}
STAGES = f"""
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {{devices: "0", num_replicas: 1}}
    engine_args:
      {{model: "{REPOSITORY}/models/tiny", served_model_name: one, device: cpu, max_num_seqs: 1}}
  - stage_id: 1
    stage_type: diffusion
    runtime: {{devices: "1", num_replicas: 1}}
    engine_args:
      {{model: "{REPOSITORY}/models/tiny", served_model_name: four, device: cpu, max_num_seqs: 4}}
"""


@pytest.fixture(scope="module")
def service(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two models of one replica each: one takes one request at a time, the other four."""
    folder = tmp_path_factory.mktemp("cancels")
    stage = folder / "stage.yaml"
    stage.write_text(STAGES)
    service = Service(redis_url, f"{folder.name}:", folder, stage)
    try:
        service.start("replica0", "replica1")
        yield service
    finally:
        service.stop()


def _reference(service: Service, model: str) -> bytes:
    return service.output(service.ended(service.submit(model=model, **FIELDS)["id"])).content


@pytest.mark.parametrize("model", MODELS)
def test_after_a_cancel_in_mid_run_the_same_seed_gives_the_same_bytes(
    service: Service, model: str
) -> None:
    reference = _reference(service, model)
    for number in range(ROUNDS):
        first = service.submit(model=model, **{**FIELDS, "num_inference_steps": 400})
        service.at_step(first["id"], 1 + number % 5)
        service.call("POST", f"/v1/requests/{first['id']}/cancel")
        second = service.ended(service.submit(model=model, **FIELDS)["id"])
        assert service.output(second).content == reference, number
        assert second["attempt"] == 1
        assert service.ended(first["id"])["status"] == "canceled"
        assert service.files(first["id"]) == []


@pytest.mark.parametrize("model", MODELS)
def test_a_cancel_just_as_a_request_ends_never_harms_the_next(service: Service, model: str) -> None:
    reference = _reference(service, model)
    ends: Counter[str] = Counter()
    for number in range(ENDS):
        first: Any = service.submit(model=model, **FIELDS)
        second = service.submit(model=model, **FIELDS)
        service.at_step(first["id"], STEPS - number % 4)
        answer = service.call("POST", f"/v1/requests/{first['id']}/cancel")
        assert answer.status in {200, 202}
        done = service.ended(second["id"])
        assert (done["status"], done["attempt"]) == ("succeeded", 1), number
        assert service.output(done).content == reference, number
        first = service.ended(first["id"])
        ends[first["status"]] += 1
        if answer.status == 200 and first["status"] == "succeeded":
            assert service.output(first).content == reference
        else:
            # Also where its file was written by then, which goes once its replica hears of it.
            assert first["status"] == "canceled"
            wait_until(lambda i=first["id"]: service.files(i) == [], 10, "no file")  # type: ignore[misc]
    print(f"\n{model}: a cancel at the end found {dict(ends)}")  # noqa: T201 - shown by make chaos
