"""The tasks of the bundled model's weights: from text, from an image, and inside a mask."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionControlNetPipeline, StableDiffusionImg2ImgPipeline
from PIL import Image, ImageDraw

from configs.errors import GenerationFailed, ModelLoadFailed
from configs.parameters import IMAGE_TO_IMAGE, INPAINT, TEXT_TO_IMAGE, Parameters
from tests.engine.conftest import MakeParameters
from tests.engine.recorder import Recorder
from tests.engine.test_sharing import difference, together
from workers.engine.abilities import inspect_abilities
from workers.engine.arguments import Inputs
from workers.engine.engine import Engine, Generation
from workers.engine.pipelines import task_pipelines
from workers.engine.progress import Interrupted

GREEN, RED = 1, 0


@pytest.fixture(scope="module")
def circle(engine: Engine):
    """A red circle on blue, made by the model itself."""
    asked = Parameters("a red circle on a blue background", 1, 64, 64, 20, guidance_scale=3.0)
    return engine.generate(asked, Recorder()).images[0]


@pytest.fixture(scope="module")
def mask():
    mask = Image.new("L", (64, 64))
    ImageDraw.Draw(mask).rectangle((12, 12, 52, 52), fill=255)
    return mask


@pytest.fixture
def edited(parameters: MakeParameters):
    def make(task: str, **changes: Any):
        usual = {"prompt": "a green square on a blue background", "num_inference_steps": 10}
        return parameters(task=task, **{**usual, **changes})

    return make


def pixels(generation: Generation, index: int = 0):
    return np.asarray(generation.images[index]).astype(int)


def test_the_bundled_weights_do_three_tasks(engine: Engine):
    abilities = engine.abilities
    assert abilities.tasks == (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT)
    assert (abilities.max_images, abilities.strength, abilities.default_strength) == (1, True, 0.8)


def test_tasks_share_every_weight(pipe: Any):
    pipes = task_pipelines(pipe)
    assert pipes[TEXT_TO_IMAGE] is pipe
    held = {id(weight) for part in (pipe.unet, pipe.vae, pipe.text_encoder) for weight in
            part.state_dict(keep_vars=True).values()}  # fmt: skip
    for each in pipes.values():
        parts = (each.unet, each.vae, each.text_encoder)
        for weight in (w for part in parts for w in part.state_dict(keep_vars=True).values()):
            assert id(weight) in held


def test_siblings_leave_the_type_of_the_weights_alone(pipe: Any):
    pipe.unet.to(torch.bfloat16)
    task_pipelines(pipe)
    assert (pipe.unet.dtype, pipe.vae.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("strength", "steps"), [(0.2, 2), (0.75, 7), (1.0, 10)])
def test_image_to_image_runs_and_counts_the_steps_of_its_strength(
    engine: Engine, edited: Any, circle: Image.Image, strength: float, steps: int
):
    recorder = Recorder()
    asked = edited(IMAGE_TO_IMAGE, strength=strength)
    made = engine.generate(asked, recorder, Inputs((circle,)))
    assert recorder.calls == [(0, 10), *((step, steps) for step in range(steps + 1))]
    assert (made.steps, made.warnings) == (steps, ())
    assert pixels(made)[32, 32].argmax() == GREEN
    assert pixels(made)[2, 2].argmax() == 2


def test_little_strength_keeps_the_image_and_more_does_not(
    engine: Engine, edited: Any, circle: Image.Image
):
    far = []
    for strength in (0.1, 1.0):
        asked = edited(IMAGE_TO_IMAGE, strength=strength, prompt="a yellow star on a red ground")
        made = engine.generate(asked, Recorder(), Inputs((circle,)))
        far.append(np.abs(pixels(made) - np.asarray(circle)).mean())
    assert far[0] < 20 < far[1]


def test_a_mask_says_what_is_made_anew(
    engine: Engine, edited: Any, circle: Image.Image, mask: Image.Image
):
    asked = edited(INPAINT, num_inference_steps=15)
    made = engine.generate(asked, Recorder(), Inputs((circle,), mask))
    assert pixels(made)[32, 32].argmax() == GREEN
    kept = np.asarray(mask) == 0
    assert np.abs(pixels(made) - np.asarray(circle))[kept].mean() < 12

    assert engine.abilities.padding_mask_crop
    near = edited(INPAINT, num_inference_steps=4, padding_mask_crop=2)
    small = Image.new("L", (64, 64))
    small.paste(255, (24, 24, 40, 40))
    cropped = pixels(engine.generate(near, Recorder(), Inputs((circle,), small)))
    changed = np.abs(cropped - np.asarray(circle)).max(axis=2)
    assert changed[24:40, 24:40].max() > 16
    # What is painted is pasted in: the pixels around it are those that were given.
    assert changed[np.asarray(small) == 0].max() == 0

    nothing = engine.generate(asked, Recorder(), Inputs((circle,), Image.new("L", (64, 64))))
    assert pixels(nothing)[32, 32].argmax() == RED


@pytest.mark.parametrize("task", [IMAGE_TO_IMAGE, INPAINT])
def test_another_size_is_made_as_asked(
    engine: Engine, edited: Any, circle: Image.Image, mask: Image.Image, task: str
):
    inputs = Inputs((circle.resize((200, 90)),), mask if task == INPAINT else None)
    made = engine.generate(edited(task, width=96, height=48), Recorder(), inputs)
    assert (made.images[0].size, made.warnings) == ((96, 48), ())


@pytest.mark.parametrize("task", [IMAGE_TO_IMAGE, INPAINT])
def test_outputs_are_what_their_seeds_make_alone_and_a_cancel_leaves_nothing(
    engine: Engine, edited: Any, circle: Image.Image, mask: Image.Image, task: str
):
    inputs = Inputs((circle,), mask if task == INPAINT else None)
    asked = edited(task, strength=0.6, num_outputs_per_prompt=2, seed=5)
    both = engine.generate(asked, Recorder(), inputs)
    for call in (1, 3):
        with pytest.raises(Interrupted):
            engine.generate(asked, Recorder(stop_at=call), inputs)
    again = engine.generate(asked, Recorder(), inputs)
    for index in (0, 1):
        assert np.array_equal(pixels(again, index), pixels(both, index))
        single = asked.with_changes({"seed": 5 + index, "num_outputs_per_prompt": 1})
        alone = engine.generate(single, Recorder(), inputs)
        assert np.abs(pixels(both, index) - pixels(alone)).max() <= 1


def test_requests_of_all_three_tasks_share_steps_and_make_what_each_makes_alone(
    sharing: Engine, edited: Any, circle: Image.Image, mask: Image.Image
):
    asked = [
        edited(TEXT_TO_IMAGE, seed=1),
        edited(IMAGE_TO_IMAGE, seed=2, strength=0.7),
        edited(INPAINT, seed=3, strength=0.9),
    ]
    inputs = [Inputs(), Inputs((circle,)), Inputs((circle,), mask)]
    alone = [
        sharing.generate(each, Recorder(), images)
        for each, images in zip(asked, inputs, strict=True)
    ]
    made = together(sharing, asked, inputs=inputs)
    assert max(map(difference, made, alone)) <= 1
    assert max(sharing.rendezvous.histogram) > 1


@pytest.mark.parametrize(("task", "missing"), [(IMAGE_TO_IMAGE, "image"), (INPAINT, "mask_image")])
def test_a_task_without_its_image_fails_and_says_so(
    engine: Engine, edited: Any, circle: Image.Image, task: str, missing: str
):
    images = (circle,) if task == INPAINT else ()
    with pytest.raises(GenerationFailed, match=f"^{missing}: {task} needs an? (image|mask)"):
        engine.generate(edited(task), Recorder(), Inputs(images))


def test_a_model_saved_for_one_task_does_that_task(pipe: Any):
    saved = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    engine = Engine(saved, inspect_abilities(saved, {}))
    assert engine.abilities.tasks == (IMAGE_TO_IMAGE,)
    engine.warm_up()


def test_a_pipeline_that_needs_what_no_client_can_give_is_refused(pipe: Any):
    with pytest.raises(ModelLoadFailed, match="needs more than a prompt"):
        task_pipelines(
            StableDiffusionControlNetPipeline(
                **pipe.components, controlnet=[], requires_safety_checker=False
            )
        )
