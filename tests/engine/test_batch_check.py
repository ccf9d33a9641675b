"""How far a picture made in a batch may be from the one made alone, in half precision."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs.parameters import Parameters
from workers.engine.arguments import Inputs
from workers.engine.generation import Generation
from workers.engine.run import Slot
from workers.engine.warm_up import is_right_in_batch

SIZE = 64


def generation(pixels: Any) -> Generation:
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return Generation((image,), (0,), "euler", 2, 0.0, 0.0, 0.0)


def picture(seed: int) -> Any:
    return np.random.default_rng(seed).integers(40, 216, (SIZE, SIZE, 3)).astype(float)


class Model:
    """Draws noise of each seed; in a batch it changes that of other requests and of copies."""

    def __init__(self, others: Any, copies: Any = 0) -> None:
        self.others, self.copies = others, copies

    def alone(self, parameters: Parameters, _inputs: Inputs) -> Generation:
        return generation(picture(parameters.seed or 0))

    def together(self, slots: Sequence[Slot]) -> list[Generation]:
        seeds = [slot.parameters.seed or 0 for slot in slots]
        change = self.copies if len(set(seeds)) == 1 else self.others
        return [generation(picture(seed) + change) for seed in seeds[:-1]]

    def is_right(self, dtype: str) -> bool:
        asked = Parameters(prompt="", seed=0, width=SIZE, height=SIZE, num_inference_steps=2)
        return is_right_in_batch(asked, dtype, self.alone, self.together)


def one_pixel(steps: int) -> Any:
    change = np.zeros((SIZE, SIZE, 3))
    change[10, 10] = steps
    return change


@pytest.mark.parametrize(
    ("dtype", "others", "copies", "right"),
    [
        ("bfloat16", one_pixel(39), 0, True),  # an edge that rounds to the other side
        ("float16", one_pixel(39), 0, True),
        ("float32", one_pixel(39), one_pixel(39), False),
        ("bfloat16", 3, 0, True),
        ("bfloat16", 6, 0, False),
        ("float16", 3, 0, False),
        ("bfloat16", 6, 3, True),  # this model rounds so
        ("float16", 3, 2, True),
        ("bfloat16", 20, 6, False),
        ("float32", 3, 3, False),
    ],
)
def test_rounding_is_as_much_as_that_of_copies(dtype: str, others: Any, copies: Any, right: bool):
    assert Model(others, copies).is_right(dtype) is right


def test_rows_of_a_neighbour_are_found_out_however_coarse_the_type():
    neighbour = picture(1) - picture(0)
    assert not Model(neighbour).is_right("bfloat16")
