"""A replica with room for several requests: they run at a time and share denoiser calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from configs.settings import REPOSITORY
from scripts.tiny_model.picture_check import check_picture
from scripts.tiny_model.shapes import Spec
from tests.e2e.service import Service

SPECS = (
    Spec("circle", "red", "blue", "large"),
    Spec("square", "yellow", "black", "large"),
    Spec("triangle", "white", "green", "large"),
)


@pytest.fixture(scope="module")
def roomy(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("roomy")
    stages = yaml.safe_load((REPOSITORY / "configs" / "tiny_cpu.yaml").read_text())
    stages["stages"][0]["runtime"].update(devices="0", num_replicas=1)
    stages["stages"][0]["engine_args"]["max_num_seqs"] = 4
    (folder / "stages.yaml").write_text(yaml.safe_dump(stages))
    prefix = f"e2e-{secrets.token_hex(4)}:"
    service = Service(redis_url, prefix, folder, stage_file=folder / "stages.yaml")
    try:
        service.start("replica0")
        yield service
    finally:
        service.stop()


def prompt(spec: Spec) -> str:
    return f"a {spec.size} {spec.colour} {spec.shape} on a {spec.background} background"


def test_requests_of_one_replica_share_calls_and_show_what_was_asked(roomy: Service) -> None:
    long = [
        roomy.submit(prompt(spec), num_inference_steps=300 + 20 * index, seed=index)
        for index, spec in enumerate(SPECS)
    ]
    alone = roomy.submit(prompt(SPECS[0]), num_inference_steps=20, seed=5, deterministic=True)
    assert roomy.ended(alone["id"])["timings"]["batch_mean"] == 1.0
    for request, spec in zip(long, SPECS, strict=True):
        ended = roomy.ended(request["id"])
        assert ended["timings"]["batch_mean"] > 1.2
        assert check_picture(roomy.output(ended).image, spec).ok
    again = roomy.submit(prompt(SPECS[0]), num_inference_steps=20, seed=5)
    pictures = [roomy.output(roomy.ended(each["id"])).image for each in (alone, again)]
    assert pictures[0].tobytes() == pictures[1].tobytes()


def test_one_that_is_canceled_leaves_its_neighbours_at_work(roomy: Service) -> None:
    doomed = roomy.submit(prompt(SPECS[1]), num_inference_steps=900, seed=1)
    other = roomy.submit(prompt(SPECS[0]), num_inference_steps=300, seed=2)
    roomy.at_step(doomed["id"], 1)
    roomy.at_step(other["id"], 1)
    assert roomy.call("POST", f"/v1/requests/{doomed['id']}/cancel").status == 202
    assert roomy.ended(doomed["id"])["status"] == "canceled"
    ended = roomy.ended(other["id"])
    assert check_picture(roomy.output(ended).image, SPECS[0]).ok
    assert roomy.files(doomed["id"]) == []
