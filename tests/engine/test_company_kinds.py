"""Companies of requests with several outputs, and of those that start from images."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxKontextPipeline
from PIL import Image

from configs.errors import NonFiniteOutput
from routing.parameters import (
    FROM_IMAGE_TASKS,
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINT,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
    Parameters,
)
from scripts.families import save_family
from scripts.family_trial import pixels, small_inputs, small_request
from tests.engine.company import TIMEOUT_S, Canceler, Company, Last, difference
from tests.engine.conftest import MakeParameters, plan
from tests.engine.recorder import Recorder, Steerer
from tests.engine.toy_denoiser import Gate
from workers.denoiser.batch_lesson import BatchLesson
from workers.engine.abilities import inspect_abilities
from workers.engine.company import company_of
from workers.engine.company_proof import is_right_in_company
from workers.engine.engine import Engine, Generation
from workers.engine.inputs import Inputs
from workers.engine.observer import Interrupted
from workers.engine.pipeline_loader import load_pipeline
from workers.engine.seat import Seat

PROMPTS = ("a red circle on a blue background", "a star", "a green heart on a white ground")
OUTPUTS = (2, 1, 3)
TASKS = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT)
FAMILIES = {
    "stable_diffusion_xl": TASKS,
    "stable_diffusion_3": TASKS,
    "flux": TASKS,
    "ltx": (TEXT_TO_VIDEO, IMAGE_TO_VIDEO),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Company]:
    company = Company(load_pipeline(plan()))
    yield company
    company.pool.shutdown()


@pytest.fixture
def company(shared: Company) -> Company:
    shared.encoded.clear()
    shared.decoded.clear()
    return shared


@pytest.fixture
def asked(parameters: MakeParameters) -> list[Parameters]:
    """Requests of 2, 1 and 3 outputs, with seeds far apart."""
    return [
        parameters(prompt=prompt, seed=10 * index, num_outputs_per_prompt=outputs)
        for index, (prompt, outputs) in enumerate(zip(PROMPTS, OUTPUTS, strict=True))
    ]


def inputs_for(task: str, index: int) -> Inputs:
    """Images and masks of one task, each its own."""
    inputs = small_inputs(task)
    turn = 90 * index
    return Inputs(
        tuple(each.rotate(turn) for each in inputs.images),
        None if inputs.mask is None else inputs.mask.rotate(turn),
    )


def of_task(asked: list[Parameters], task: str) -> tuple[list[Parameters], list[Inputs]]:
    changes: dict[str, Any] = {"task": task}
    if task in FROM_IMAGE_TASKS:
        changes |= {"strength": 0.5, "num_inference_steps": 12}  # six steps, as from text
    changed = [each.with_changes(changes) for each in asked]
    return changed, [inputs_for(task, index) for index in range(len(asked))]


def results(started: list[Any]) -> list[Generation]:
    return [each.result(TIMEOUT_S) for each in started]


@pytest.mark.parametrize("task", TASKS)
def test_requests_of_several_outputs_start_together_and_each_output_is_that_of_its_seed(
    company: Company, asked: list[Parameters], task: str
):
    asked, inputs = of_task(asked, task)
    alone = company.alone(asked, inputs)
    watchers = [Recorder() for _ in asked]
    made = results(company.start(asked, watchers, inputs))
    assert (company.encoded, company.decoded) == ([6, 6], [6])
    assert max(map(difference, made, alone)) <= 1
    for generation, each, own, watcher in zip(made, asked, inputs, watchers, strict=True):
        assert generation.batch_mean == 3
        assert generation.warnings == ()
        assert list(dict.fromkeys(watcher.calls))[1 - 7 :] == [(step, 6) for step in range(1, 7)]
        for index, seed in enumerate(each.seeds()):
            single = each.with_changes({"seed": seed, "num_outputs_per_prompt": 1})
            expected = company.engine.generate(single, Recorder(), own)
            assert np.abs(pixels(generation, index) - pixels(expected)).max() <= 1


@pytest.mark.parametrize(
    ("task", "who"),
    [(TEXT_TO_IMAGE, 0), (TEXT_TO_IMAGE, 2), (IMAGE_TO_IMAGE, 0), (INPAINT, 1), (INPAINT, 2)],
)
def test_one_that_is_canceled_takes_all_its_rows_along(
    company: Company,
    asked: list[Parameters],
    task: str,
    who: int,
    monkeypatch: pytest.MonkeyPatch,
):
    asked, inputs = of_task(asked, task)
    alone = company.alone(asked, inputs)
    rows: list[int] = []
    forward = company.pipe.unet.conv_in.forward

    def counted(sample: torch.Tensor):
        rows.append(len(sample))
        return forward(sample)

    monkeypatch.setattr(company.pipe.unet.conv_in, "forward", counted)
    monkeypatch.setattr(BatchLesson, "doubts", lambda *_: False)  # which would count rows again
    gate = Gate()
    watchers: list[Any] = [Last(gate) for _ in asked]
    watchers[who] = Canceler(at=2)
    made = company.start(asked, watchers, inputs)
    with pytest.raises(Interrupted):
        made[who].result(TIMEOUT_S)
    gate.open()
    stayed = [index for index in range(3) if index != who]
    for index in stayed:
        assert difference(made[index].result(TIMEOUT_S), alone[index]) <= 1
    outputs = sum(OUTPUTS[index] for index in stayed)
    assert company.decoded == [outputs]
    assert sum(rows) == 2 * (6 * outputs + 2 * OUTPUTS[who])


def test_one_output_of_nan_fails_its_request_and_no_other(
    company: Company, asked: list[Parameters], monkeypatch: pytest.MonkeyPatch
):
    alone = company.alone(asked)
    prepare = company.pipe.prepare_latents

    def spoil(*args: Any, **options: Any):
        latents = prepare(*args, **options)
        if len(latents) == 6:
            latents[4] = torch.nan
        return latents

    monkeypatch.setitem(vars(company.pipe), "prepare_latents", spoil)  # copies have it too
    made = company.start(asked, [Recorder() for _ in asked])
    with pytest.raises(NonFiniteOutput):
        made[2].result(TIMEOUT_S)
    assert max(map(difference, results(made[:2]), alone[:2])) <= 1
    assert company.decoded == [3]


def test_what_the_memory_does_not_hold_runs_by_parts_that_cut_no_request(
    asked: list[Parameters], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    company = Company(load_pipeline(plan()))
    alone = company.alone(asked)
    rows: list[int] = []
    forward = company.pipe.unet.conv_in.forward

    def scarce(sample: torch.Tensor):
        if len(sample) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        rows.append(len(sample))
        return forward(sample)

    monkeypatch.setattr(company.pipe.unet.conv_in, "forward", scarce)
    made = results(company.start(asked, [Recorder() for _ in asked]))
    company.pool.shutdown()
    assert max(map(difference, made, alone)) <= 1
    assert "need too much memory" in caplog.text or "failed, each runs alone" in caplog.text
    # Two outputs and one, and three, each with and without guidance.
    assert rows[-2:] == [6, 6]
    assert company.decoded == [6]


def test_each_sees_how_its_own_first_output_looks(company: Company, asked: list[Parameters]):
    asked = [each.with_changes({"preview": index > 0}) for index, each in enumerate(asked)]
    alone = [Recorder(preview=True) for _ in asked]
    for each, watcher in zip(asked, alone, strict=True):
        company.engine.generate(each, watcher)
    company.encoded.clear()
    together = [Recorder(preview=True) for _ in asked]
    results(company.start(asked, together))
    assert company.encoded == [6, 6]
    for one, other in zip(alone, together, strict=True):
        assert [step for step, _ in other.previews] == [step for step, _ in one.previews]
        shown = [np.asarray(watcher.previews[-1][1]).astype(int) for watcher in (one, other)]
        # What was learnt in between moves the map a little.
        assert np.abs(shown[0] - shown[1]).mean() < 4


def test_guidance_of_one_with_several_outputs_changes_where_it_would_have(
    company: Company, asked: list[Parameters]
):
    alone = company.alone(asked)
    steered = company.engine.generate(asked[0], Steerer(3, guidance_scale=8.0))
    assert difference(steered, alone[0]) > 8
    alone[0] = steered
    company.encoded.clear()
    made = results(company.start(asked, [Steerer(3, guidance_scale=8.0), Recorder(), Recorder()]))
    assert max(map(difference, made, alone)) <= 1
    assert (made[0].steps, made[0].warnings) == (6, ())
    assert company.encoded == [6, 6]


def test_no_more_outputs_start_together_than_may_and_the_rest_are_the_next_company(
    company: Company, asked: list[Parameters], monkeypatch: pytest.MonkeyPatch
):
    asked += [asked[1].with_changes({"seed": 40}), asked[0].with_changes({"seed": 50})]
    alone = company.alone(asked)
    monkeypatch.setattr(company.engine._runs.turns, "most_outputs", 4)
    made = results(company.start(asked, [Recorder() for _ in asked]))
    assert max(map(difference, made, alone)) <= 1
    # Two, one and one; those of three and of two find no room and are too many for one company.
    assert company.encoded[:2] == [4, 4]
    assert sorted(company.decoded) == [2, 3, 4]


def test_images_of_any_size_are_laid_on_that_of_the_output_and_start_together(
    company: Company, asked: list[Parameters]
):
    asked, inputs = of_task(asked, IMAGE_TO_IMAGE)
    inputs[1] = Inputs((inputs[1].images[0].resize((90, 200)),))
    alone = company.alone(asked, inputs)
    made = results(company.start(asked, [Recorder() for _ in asked], inputs))
    assert max(map(difference, made, alone)) <= 1
    assert company.encoded == [6, 6]


@pytest.mark.parametrize(
    "change",
    [{"strength": 0.7}, {"task": INPAINT}, {"task": TEXT_TO_IMAGE}, {"deterministic": True}],
    ids=lambda change: next(iter(change.values())),
)
def test_those_that_start_otherwise_from_their_image_start_by_themselves(
    company: Company, asked: list[Parameters], change: dict[str, Any]
):
    asked, inputs = of_task(asked[:2], IMAGE_TO_IMAGE)
    asked[1] = asked[1].with_changes(change)
    inputs[1] = inputs_for(asked[1].task, 1)
    alone = company.alone(asked, inputs)
    made = results(company.start(asked, [Recorder(), Recorder()], inputs))
    assert max(map(difference, made, alone)) <= 1
    assert len(company.encoded) == 4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_as_right_in_company_as_alone(name: str, tmp_path: Path):
    """Requests of two outputs and of one, each with its own image, and one that leaves."""
    frames = {"num_frames": 9} if name == "ltx" else {}
    company = Company(
        load_pipeline(plan(save_family(name, tmp_path))), width=64, height=64, **frames
    )
    for task in FAMILIES[name]:
        asked = [
            small_request(
                company.engine.abilities,
                task,
                prompt=prompt,
                seed=10 * index,
                num_outputs_per_prompt=outputs,
                num_inference_steps=4,
            )
            for index, (prompt, outputs) in enumerate(zip(PROMPTS, OUTPUTS, strict=True))
        ]
        if task in {IMAGE_TO_IMAGE, INPAINT}:
            asked = [each.with_changes({"strength": 0.5}) for each in asked]
        inputs = [inputs_for(task, index) for index in range(3)]
        alone = company.alone(asked[:2], inputs[:2])
        assert not np.array_equal(pixels(alone[0], 1), pixels(alone[0]))
        made = company.start(asked, [Recorder(), Recorder(), Canceler(at=1)], inputs)
        assert max(map(difference, results(made[:2]), alone)) <= 1
        with pytest.raises(Interrupted):
            made[2].result(TIMEOUT_S)
        assert company.encoded[0] == 6
        assert company.decoded == [3]
    company.pool.shutdown()


def test_editing_models_keep_the_size_of_an_image_so_only_equal_ones_start_together(
    parameters: MakeParameters,
):
    asked = parameters(task=IMAGE_TO_IMAGE, image=("one",))

    def company(kind: Any, *images: Image.Image, **changes: Any):
        return company_of(asked.with_changes(changes), Inputs(images), kind)

    square, other, tall = (Image.new("L", size) for size in ((160, 160), (160, 160), (160, 256)))
    edit, restart = FluxKontextPipeline, FluxImg2ImgPipeline
    assert company(edit, square) is not None
    assert company(edit, square) == company(edit, other, image=("two",), seed=7)
    assert company(edit, square) != company(edit, tall)
    assert company(restart, square) == company(restart, tall)
    # A list of images is taken for several images of one prompt.
    assert company(edit, square, other) is None


def test_an_editing_model_is_proven_in_company(tmp_path: Path):
    pipe = load_pipeline(plan(save_family("flux_kontext", tmp_path)))
    engine = Engine(pipe, inspect_abilities(pipe, {"width": 64, "height": 64}), max_num_seqs=2)
    engine.warm_up()
    assert engine._runs.in_company == [TEXT_TO_IMAGE, IMAGE_TO_IMAGE]


def test_a_video_from_one_image_for_all_outputs_starts_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pipe = load_pipeline(plan(save_family("wan_image_to_video", tmp_path)))
    company = Company(pipe, width=48, height=48, num_frames=5)
    assert "do not start together" not in caplog.text  # it is not even tried
    asked = [
        small_request(company.engine.abilities, IMAGE_TO_VIDEO, prompt=prompt)
        for prompt in PROMPTS[:2]
    ]
    inputs = [inputs_for(IMAGE_TO_VIDEO, index) for index in range(2)]
    alone = company.alone(asked, inputs)
    made = results(company.start(asked, [Recorder(), Recorder()], inputs))
    company.pool.shutdown()
    assert max(map(difference, made, alone)) <= 1
    assert company.decoded == [1, 1]


@pytest.mark.parametrize("task", TASKS[1:])
def test_a_model_that_gives_all_the_image_or_mask_of_the_first_is_found_out(
    company: Company, parameters: MakeParameters, task: str, caplog: pytest.LogCaptureFixture
):
    asked = parameters(task=task, strength=0.5, num_inference_steps=4)

    def alone(parameters: Parameters, inputs: Inputs):
        return company.engine.generate(parameters, Recorder(), inputs)

    def mixing(seats: Sequence[Seat], name: str):
        first = getattr(seats[0].inputs, name)
        return [alone(seat.parameters, replace(seat.inputs, **{name: first})) for seat in seats[:2]]

    for name in ("images",) if task == IMAGE_TO_IMAGE else ("images", "mask"):
        assert not is_right_in_company(asked, "bfloat16", alone, partial(mixing, name=name))
        assert f"{task}: requests do not start together, for that changes pixels" in caplog.text
        caplog.clear()
