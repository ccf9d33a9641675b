"""What breaks below a request in a real worker: its device, its memory, the place of its output."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from configs.settings import REPOSITORY
from tests.e2e.service import Service
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

EXIT_DEVICE = 4
FULL_AT = 40_000  # bytes of a file
FAULTS = {"PYTHONPATH": str(REPOSITORY / "tests" / "faults"), "FAULTS": "72:cuda,80:memory"}


@pytest.fixture(scope="module")
def shared(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One replica of two requests at a time, breaking by size, and one sound replica."""
    folder = tmp_path_factory.mktemp("faults")
    stage = folder / "stage.yaml"
    text = (REPOSITORY / "configs" / "tiny_cpu.yaml").read_text()
    text = text.replace("./models/tiny", str(REPOSITORY / "models" / "tiny"))
    assert "max_num_seqs: 1" in text
    stage.write_text(text.replace("max_num_seqs: 1", "max_num_seqs: 2"))
    service = Service(redis_url, f"{folder.name}:", folder, stage, {"MAX_ATTEMPTS": "2"})
    try:
        service.start_replica("replica0", FAULTS)
        service.start("replica1")
        service.wait_for("replica0", "ready")
        yield service
    finally:
        service.stop()


@pytest.fixture
def broken(shared: Service) -> Service:
    """The same, both replicas ready."""
    if shared.processes["replica0"].poll() is not None:
        shared.start_replica("replica0", FAULTS)
    for name in ("replica0", "replica1"):
        shared.wait_for(name, "ready")
    return shared


def _blame(service: Service, request_id: str) -> tuple[int, bool]:
    with Redis.from_url(service.redis_url, decode_responses=True) as client:
        key = f"{service.redis_prefix}request:{request_id}"
        crashes, suspect = client.hmget(key, "crashes", "suspect")
    return int(crashes), suspect == "1"


def _submit_to_both(service: Service, **fields: Any) -> tuple[Any, Any]:
    """Submit twice; returns what replica0 has and what replica1 has."""
    first, second = (service.submit_to(f"replica{k}", "a cat", **fields) for k in range(2))
    return first, second


def test_too_little_memory_fails_the_one_request_and_the_replica_goes_on(broken: Service) -> None:
    before = broken.call("GET", "/v1/replicas/replica0").json
    neighbours = _submit_to_both(broken, num_inference_steps=150, seed=3)
    culprit, twin = _submit_to_both(broken, width=80)
    failed = broken.ended(culprit["id"])
    assert (failed["status"], failed["error"]["code"]) == ("failed", "out_of_memory")
    assert "1 x 80x64" in failed["error"]["message"]
    for request in (*neighbours, twin, *_submit_to_both(broken)):
        assert broken.ended(request["id"])["status"] == "succeeded"
    after = broken.call("GET", "/v1/replicas/replica0").json
    assert (after["pid"], after["state"]) == (before["pid"], "ready")


def test_a_full_disk_fails_what_does_not_fit_and_the_replica_goes_on(broken: Service) -> None:
    """The system lets the process write files up to a size, and fails ``write`` beyond it."""
    before = broken.call("GET", "/v1/replicas/replica1").json
    broken.call("POST", "/v1/replicas/replica0/drain")
    assert (broken.folder / "replica1.log").stat().st_size < FULL_AT / 2  # its log has room
    large: dict[str, Any] = {"width": 512, "height": 512, "num_outputs_per_prompt": 2}
    _limit_files(before["pid"], FULL_AT)
    try:
        failed = broken.ended(broken.submit(num_inference_steps=1, **large)["id"])
        fits = broken.ended(broken.submit()["id"])
    finally:
        _limit_files(before["pid"], resource.RLIM_INFINITY)
        broken.call("POST", "/v1/replicas/replica0/resume")
    assert (failed["status"], failed["error"]["code"]) == ("failed", "output_write_failed")
    assert "after 4 tries" in failed["error"]["message"]
    assert "File too large" in failed["error"]["message"]
    assert failed["outputs"] == []
    assert broken.files(failed["id"]) == []  # temporary ones are among them
    assert broken.output(fits).image.size == (64, 64)
    again = broken.ended(
        broken.submit_to("replica1", "a cat", num_inference_steps=1, **large)["id"]
    )
    assert [len(broken.output(again, index).content) > FULL_AT for index in (0, 1)] == [True] * 2
    after = broken.call("GET", "/v1/replicas/replica1").json
    assert (after["pid"], after["state"]) == (before["pid"], "ready")
    assert "trying again in 1 s" in broken.log("replica1")


def _limit_files(pid: int, size: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_an_output_without_a_place_fails_after_some_tries_and_the_replica_goes_on(
    broken: Service, tmp_path: Path
) -> None:
    assert broken.ended(broken.submit()["id"])["status"] == "succeeded"
    aside = tmp_path / "outputs"
    broken.outputs.rename(aside)
    broken.outputs.write_text("a file where the folder of the outputs should be")
    try:
        request = broken.submit()
        failed = broken.ended(request["id"])
    finally:
        broken.outputs.unlink()
        aside.rename(broken.outputs)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "output_write_failed")
    assert "after 4 tries" in failed["error"]["message"]
    assert failed["error"]["retryable"] is True
    assert failed["outputs"] == []
    for again in _submit_to_both(broken):
        assert broken.ended(again["id"])["status"] == "succeeded"
    wait_until(lambda: broken.files(request["id"]) == [], 10, "no trace of the failed output")


def test_a_lost_device_ends_the_process_and_only_the_request_that_was_alone_is_blamed(
    broken: Service,
) -> None:
    """With replica1 drained both attempts are on the breaking one, which is started again once."""
    broken.call("POST", "/v1/replicas/replica1/drain")
    neighbour = broken.submit(num_inference_steps=150, seed=3)
    broken.at_step(neighbour["id"], 1)
    culprit = broken.submit(width=72)
    assert broken.processes["replica0"].wait(60) == EXIT_DEVICE
    for request in (culprit, neighbour):
        assert _blame(broken, request["id"]) == (0, True), "as one of two"
    broken.start_replica("replica0", FAULTS)
    assert broken.processes["replica0"].wait(60) == EXIT_DEVICE
    replica = broken.call("GET", "/v1/replicas/replica0").json
    assert replica["state"] == "failed"
    assert "illegal memory access" in replica["error"]
    assert culprit["id"] in replica["error"]
    assert neighbour["id"] not in replica["error"]
    assert "the process was ended" in broken.log("replica0")
    assert _blame(broken, culprit["id"]) == (1, True)
    broken.call("POST", "/v1/replicas/replica1/resume")
    ended = broken.ended(culprit["id"])
    assert (ended["status"], ended["replica"]) == ("succeeded", "replica1")
    assert ended["attempt"] >= 3
    assert broken.ended(neighbour["id"])["status"] == "succeeded"
    assert _blame(broken, neighbour["id"]) == (0, True)
