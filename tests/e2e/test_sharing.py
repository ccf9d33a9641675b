"""A replica with room for several requests: they run at a time and share denoiser calls."""

from __future__ import annotations

from scripts.lab.tiny_model.picture_check import check_picture
from scripts.lab.tiny_model.shapes import Spec
from tests.e2e.service import Service

SPECS = (
    Spec("circle", "red", "blue", "large"),
    Spec("square", "yellow", "black", "large"),
    Spec("triangle", "white", "green", "large"),
)


def prompt(spec: Spec) -> str:
    return f"a {spec.size} {spec.colour} {spec.shape} on a {spec.background} background"


def test_requests_of_one_replica_share_calls_and_show_what_was_asked(roomy: Service) -> None:
    long = [
        roomy.submit(prompt(spec), num_inference_steps=120 + 10 * index, seed=index)
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
    other = roomy.submit(prompt(SPECS[0]), num_inference_steps=120, seed=2)
    roomy.at_step(doomed["id"], 1)
    roomy.at_step(other["id"], 1)
    assert roomy.call("POST", f"/v1/requests/{doomed['id']}/cancel").status == 202
    assert roomy.ended(doomed["id"])["status"] == "canceled"
    ended = roomy.ended(other["id"])
    assert check_picture(roomy.output(ended).image, SPECS[0]).ok
    assert roomy.files(doomed["id"]) == []
