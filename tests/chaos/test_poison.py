"""Requests that kill their replica's process: they fail, after so many attempts, and nobody else.

The launcher supervises, so that a killed replica comes back and meets the next attempt. The short
form runs with the other tests; ``make chaos`` runs the long one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.settings import REPOSITORY
from tests.e2e.launcher import Launcher
from tests.waiting import wait_until

LONG_FORM = "CHAOS_REQUESTS" in os.environ
# With one attempt innocents would be the first to fail, if a crash in company ended anybody.
INNOCENTS, ATTEMPTS = (58, 3) if LONG_FORM else (22, 1)
POISONS = 2
END_S = 400.0


@pytest.fixture
def launcher(redis_binary: str, tmp_path: Path) -> Iterator[Launcher]:
    """Two replicas of four requests at a time, killed by any output 72 pixels wide."""
    stage = tmp_path / "stage.yaml"
    text = (REPOSITORY / "configs" / "tiny_cpu.yaml").read_text()
    text = text.replace("./models/tiny", str(REPOSITORY / "models" / "tiny"))
    stage.write_text(text.replace("max_num_seqs: 1", "max_num_seqs: 4"))
    launcher = Launcher(
        tmp_path,
        STAGE_CONFIGS_PATH=str(stage),
        PYTHONPATH=str(REPOSITORY / "tests" / "faults"),
        FAULTS="72:kill",
        MAX_ATTEMPTS=str(ATTEMPTS),
        HEARTBEAT_S="0.5",
        HEARTBEAT_EXPIRY_S="3",
        SWEEP_S="0.5",
    )
    try:
        launcher.start()
        yield launcher
    finally:
        launcher.close()


@pytest.mark.slow
def test_two_poison_requests_fail_and_no_innocent_is_blamed(launcher: Launcher) -> None:
    prompt = "a red circle on a blue background"
    # In the short form in turn with an innocent, so that one replica has both at the same time.
    first = INNOCENTS // 4
    poison_at = {first, INNOCENTS // 2 if LONG_FORM else first + 1}
    innocents, poisons = [], []
    for number in range(INNOCENTS):
        if number in poison_at:
            poisons.append(launcher.call("/v1/requests", {"prompt": prompt, "width": 72})["id"])
        body = {"prompt": prompt, "seed": 7}
        innocents.append(launcher.call("/v1/requests", body)["id"])
    assert len(poisons) == POISONS

    def ended(request_id: str) -> bool:
        status = launcher.call(f"/v1/requests/{request_id}")["status"]
        return status not in {"queued", "running"}

    for request_id in (*innocents, *poisons):
        wait_until(lambda i=request_id: ended(i), END_S, f"{request_id} to end")  # type: ignore[misc]
    for request_id in poisons:
        request = launcher.ended(request_id)
        assert (request["status"], request["error"]["code"]) == ("failed", "replica_crashed")
        crashes = launcher.crashes(request_id)
        assert f"while it ran this request, {crashes} time" in request["error"]["message"]
        # Its first may have been one in company, which ends nobody.
        assert crashes in {ATTEMPTS, max(ATTEMPTS, 2)}
        assert request["outputs"] == []
    outcomes = {launcher.ended(i)["status"] for i in innocents}
    assert outcomes == {"succeeded"}
    launcher.wait_for("ended with signal 9 (killed); starting again in ")
    # Whoever shared the first crash was in one; from then on it ran alone, and in no other.
    assert max(launcher.crashes(i) for i in innocents) <= 1
