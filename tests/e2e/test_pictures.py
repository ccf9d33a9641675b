"""What a client gets: the right pictures, from both replicas, equal for equal seeds."""

from __future__ import annotations

from collections import Counter

from scripts.lab.tiny_model.picture_check import check_picture
from tests.e2e.service import Service

PROMPTS = (
    "a red circle on a blue background",
    "a green square on a white background",
    "a yellow triangle on a purple background",
    "a blue circle on a yellow background",
    "a white square on a red background",
    "an orange circle on a black background",
    "a purple square on a green background",
    "a black triangle on an orange background",
)


def test_eight_at_once_land_four_on_each_and_show_what_was_asked(service: Service) -> None:
    answers = service.submit_all([{"prompt": prompt, "seed": 5} for prompt in PROMPTS])
    assert {answer.status for answer in answers} == {202}
    accepted = [answer.json for answer in answers]
    assert Counter(request["replica"] for request in accepted) == {"replica0": 4, "replica1": 4}
    ended = [service.ended(request["id"]) for request in accepted]
    assert {request["status"] for request in ended} == {"succeeded"}
    for prompt, request in zip(PROMPTS, ended, strict=True):
        answer = service.output(request)
        assert answer.headers["Content-Type"] == "image/png"
        verdict = check_picture(answer.image, prompt)
        assert verdict.background, prompt
        assert verdict.colour, prompt
    right = [
        check_picture(service.output(request).image, prompt).ok
        for prompt, request in zip(PROMPTS, ended, strict=True)
    ]
    assert right == [True] * 8, dict(zip(PROMPTS, right, strict=True))


def test_the_same_seed_is_the_same_file_on_either_replica(service: Service) -> None:
    pictures = {}
    for replica in ("replica0", "replica1"):
        request = service.submit_to(replica, "a pink heart on a black background", seed=77)
        pictures[replica] = service.output(service.ended(request["id"])).content
    assert pictures["replica0"] == pictures["replica1"]
    other = service.submit("a pink heart on a black background", seed=78)
    assert service.output(service.ended(other["id"])).content != pictures["replica0"]


def test_a_drawn_seed_is_told_and_makes_the_picture_again(service: Service) -> None:
    first = service.ended(service.submit()["id"])
    again = service.ended(service.submit(seed=first["parameters"]["seed"])["id"])
    assert service.output(first).content == service.output(again).content


def test_output_k_is_the_picture_of_seed_plus_k(service: Service) -> None:
    both = service.ended(service.submit(seed=10, num_outputs_per_prompt=2)["id"])
    assert [output["seed"] for output in both["outputs"]] == [10, 11]
    alone = service.ended(service.submit(seed=11)["id"])
    ours, theirs = service.output(both, 1).image, service.output(alone).image
    differences = (abs(a - b) for a, b in zip(ours.tobytes(), theirs.tobytes(), strict=True))
    assert max(differences) <= 1


def test_waiting_for_it_answers_with_the_finished_request(service: Service) -> None:
    answer = service.call(
        "POST", "/v1/requests", {"prompt": "a red star"}, headers={"Prefer": "wait=30"}
    )
    assert answer.status == 200
    request = answer.json
    assert request["status"] == "succeeded"
    assert request["progress"]["step"] == request["progress"]["steps"] == 20
    assert request["timings"]["denoise_s"] > 0
    assert request["timings"]["store_s"] > 0


def test_a_png_says_how_to_make_it_again(service: Service) -> None:
    request = service.ended(service.submit("a red ring on a white background", seed=3)["id"])
    text = service.output(request).image.text  # type: ignore[attr-defined]
    assert text["prompt"] == "a red ring on a white background"
    assert (text["seed"], text["num_inference_steps"], text["model"]) == ("3", "20", "tiny")


def test_the_file_has_what_a_cache_needs(service: Service) -> None:
    request = service.ended(service.submit(seed=1)["id"])
    first = service.output(request)
    url = request["outputs"][0]["url"]
    again = service.call("GET", url, headers={"If-None-Match": first.headers["ETag"]})
    assert again.status == 304
    assert request["outputs"][0]["bytes"] == len(first.content)
    assert service.files(request["id"]) == ["1-0.png"]
