"""Batches of requests that start from images: which start together."""

from typing import Any

import pytest
from diffusers import FluxImg2ImgPipeline, FluxKontextPipeline
from PIL import Image

from configs.parameters import IMAGE_TO_IMAGE, INPAINT, TEXT_TO_IMAGE, Parameters
from tests.engine.batch_requests import inputs_for, of_task, results, several_outputs
from tests.engine.batches import Batches, difference
from tests.engine.conftest import MakeParameters
from tests.engine.recorder import Recorder
from workers.engine.arguments import Inputs
from workers.engine.batch import batch_of


@pytest.fixture
def asked(parameters: MakeParameters) -> list[Parameters]:
    return several_outputs(parameters)


def test_images_of_any_size_are_laid_on_that_of_the_output_and_start_together(
    batches: Batches, asked: list[Parameters]
):
    asked, inputs = of_task(asked, IMAGE_TO_IMAGE)
    inputs[1] = Inputs((inputs[1].images[0].resize((90, 200)),))
    alone = batches.alone(asked, inputs)
    made = results(batches.start(asked, [Recorder() for _ in asked], inputs))
    assert max(map(difference, made, alone)) <= 1
    assert batches.encoded == [6, 6]


@pytest.mark.parametrize(
    "change",
    [{"strength": 0.7}, {"task": INPAINT}, {"task": TEXT_TO_IMAGE}, {"deterministic": True}],
    ids=lambda change: next(iter(change.values())),
)
def test_those_that_start_otherwise_from_their_image_start_by_themselves(
    batches: Batches, asked: list[Parameters], change: dict[str, Any]
):
    asked, inputs = of_task(asked[:2], IMAGE_TO_IMAGE)
    asked[1] = asked[1].with_changes(change)
    inputs[1] = inputs_for(asked[1].task, 1)
    alone = batches.alone(asked, inputs)
    made = results(batches.start(asked, [Recorder(), Recorder()], inputs))
    assert max(map(difference, made, alone)) <= 1
    assert len(batches.encoded) == 4


def test_editing_models_keep_the_size_of_an_image_so_only_equal_ones_start_together(
    parameters: MakeParameters,
):
    asked = parameters(task=IMAGE_TO_IMAGE, image=("one",))

    def batch(kind: Any, *images: Image.Image, **changes: Any):
        return batch_of(asked.with_changes(changes), Inputs(images), kind)

    square, other, tall = (Image.new("L", size) for size in ((160, 160), (160, 160), (160, 256)))
    edit, restart = FluxKontextPipeline, FluxImg2ImgPipeline
    assert batch(edit, square) is not None
    assert batch(edit, square) == batch(edit, other, image=("two",), seed=7)
    assert batch(edit, square) != batch(edit, tall)
    assert batch(restart, square) == batch(restart, tall)
    # A list of images is taken for several images of one prompt.
    assert batch(edit, square, other) is None
