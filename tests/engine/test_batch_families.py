"""Which models may be run in batches: families that are right in them, and those found out."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from configs.parameters import (
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINT,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
    Parameters,
)
from scripts.lab.families import save_family
from scripts.lab.family_trial import pixels, small_request
from tests.engine.batch_requests import OUTPUTS, PROMPTS, TASKS, inputs_for, results
from tests.engine.batches import TIMEOUT_S, Batches, Canceler, difference
from tests.engine.conftest import MakeParameters, plan
from tests.engine.recorder import Recorder
from workers.engine.abilities import inspect_abilities
from workers.engine.arguments import Inputs
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted
from workers.engine.run import Slot
from workers.engine.warm_up import is_right_in_batch

FAMILIES = {
    "stable_diffusion_xl": TASKS,
    "stable_diffusion_3": TASKS,
    "flux": TASKS,
    "ltx": (TEXT_TO_VIDEO, IMAGE_TO_VIDEO),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_as_right_in_batch_as_alone(name: str, tmp_path: Path):
    """Requests of two outputs and of one, each with its own image, and one that leaves."""
    frames = {"num_frames": 9} if name == "ltx" else {}
    batches = Batches(
        load_pipeline(plan(save_family(name, tmp_path))), width=64, height=64, **frames
    )
    for task in FAMILIES[name]:
        asked = [
            small_request(
                batches.engine.abilities,
                task,
                prompt=prompt,
                seed=10 * index,
                num_outputs_per_prompt=outputs,
                num_inference_steps=4,
            )
            for index, (prompt, outputs) in enumerate(zip(PROMPTS, OUTPUTS, strict=False))
        ]
        if task in {IMAGE_TO_IMAGE, INPAINT}:
            asked = [each.with_changes({"strength": 0.5}) for each in asked]
        inputs = [inputs_for(task, index) for index in range(3)]
        alone = batches.alone(asked[:2], inputs[:2])
        assert not np.array_equal(pixels(alone[0], 1), pixels(alone[0]))
        made = batches.start(asked, [Recorder(), Recorder(), Canceler(at=1)], inputs)
        assert max(map(difference, results(made[:2]), alone)) <= 1
        with pytest.raises(Interrupted):
            made[2].result(TIMEOUT_S)
        assert batches.encoded[0] == 6
        assert batches.decoded == [3]
    batches.pool.shutdown()


def test_an_editing_model_is_checked_in_a_batch(tmp_path: Path):
    pipe = load_pipeline(plan(save_family("flux_kontext", tmp_path)))
    engine = Engine(pipe, inspect_abilities(pipe, {"width": 64, "height": 64}), max_num_seqs=2)
    engine.warm_up()
    assert engine.batched_tasks == [TEXT_TO_IMAGE, IMAGE_TO_IMAGE]


def test_a_video_from_one_image_for_all_outputs_starts_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pipe = load_pipeline(plan(save_family("wan_image_to_video", tmp_path)))
    batches = Batches(pipe, width=48, height=48, num_frames=5)
    assert "do not start together" not in caplog.text  # it is not even tried
    asked = [
        small_request(batches.engine.abilities, IMAGE_TO_VIDEO, prompt=prompt)
        for prompt in PROMPTS[:2]
    ]
    inputs = [inputs_for(IMAGE_TO_VIDEO, index) for index in range(2)]
    alone = batches.alone(asked, inputs)
    made = results(batches.start(asked, [Recorder(), Recorder()], inputs))
    batches.pool.shutdown()
    assert max(map(difference, made, alone)) <= 1
    assert batches.decoded == [1, 1]


@pytest.mark.parametrize("task", TASKS[1:])
def test_a_model_that_gives_all_the_image_or_mask_of_the_first_is_found_out(
    batches: Batches, parameters: MakeParameters, task: str, caplog: pytest.LogCaptureFixture
):
    asked = parameters(task=task, strength=0.5, num_inference_steps=4)

    def alone(parameters: Parameters, inputs: Inputs):
        return batches.engine.generate(parameters, Recorder(), inputs)

    def mixing(slots: Sequence[Slot], name: str):
        first = getattr(slots[0].inputs, name)
        return [alone(slot.parameters, replace(slot.inputs, **{name: first})) for slot in slots[:2]]

    for name in ("images",) if task == IMAGE_TO_IMAGE else ("images", "mask"):
        assert not is_right_in_batch(asked, "bfloat16", alone, partial(mixing, name=name))
        assert f"{task}: requests do not start together, for that changes pixels" in caplog.text
        caplog.clear()
