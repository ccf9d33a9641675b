"""Whether a model may be called for several requests at once: tried before it serves any.

Texts of different lengths, negative ones too, other images, and one request that leaves on the way,
must change nothing for the others. Knows no pipelines.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from routing.parameters import Parameters
from routing.tasks import FROM_IMAGE_TASKS, INPAINT
from workers.engine.generation import Generation
from workers.engine.inputs import Inputs
from workers.engine.observer import Interrupted, SilentObserver
from workers.engine.seat import Seat

_logger = logging.getLogger(__name__)

_PROMPTS = ("warm-up", "a red circle on a blue ground", "one")
# Steps between 0 and 255 that may lie between a picture made alone and one made in company.
_ROUNDING = {"float32": 2, "float64": 2}
_COARSE = 16


class _Leaver(SilentObserver):
    def on_step(self, step: int, steps: int) -> None:
        if step:
            raise Interrupted("it leaves")


def is_right_in_company(
    parameters: Parameters,
    dtype: str,
    alone: Callable[[Parameters, Inputs], Generation],
    together: Callable[[Sequence[Seat]], Sequence[Generation]],
) -> bool:
    """Make outputs like `parameters` both ways; whatever goes wrong together means no.

    An output is one row of the call whosever it is, so requests of one output speak for those of
    several. Each gets a negative prompt of its own if `parameters` have one.
    """
    asked = [(_own(parameters, seed), _inputs(parameters, seed)) for seed in range(len(_PROMPTS))]
    expected = [alone(*each) for each in asked[:2]]
    watchers = (SilentObserver(), SilentObserver(), _Leaver())
    seats = [
        Seat(each, watcher, inputs) for (each, inputs), watcher in zip(asked, watchers, strict=True)
    ]
    try:
        made = together(seats)
        worst = max(map(_difference, made, expected))
    except Exception as error:  # noqa: BLE001 - alone the model serves all the same
        _logger.warning(
            "%s: requests do not start together, for that failed: %s", parameters.task, error
        )
        return False
    if worst > _ROUNDING.get(dtype, _COARSE):
        _logger.warning(
            "%s: requests do not start together, for that changes pixels by %d of 255",
            parameters.task,
            worst,
        )
        return False
    return True


def _own(parameters: Parameters, seed: int) -> Parameters:
    negative = None if parameters.negative_prompt is None else _PROMPTS[seed - 1]
    return parameters.with_changes(
        {"prompt": _PROMPTS[seed], "seed": seed, "negative_prompt": negative}
    )


def _inputs(parameters: Parameters, seed: int) -> Inputs:
    """An image, and a mask, in large squares, that no other seed has."""
    if parameters.task not in FROM_IMAGE_TASKS:
        return Inputs()
    numbers = np.random.default_rng(seed)
    size = (parameters.width, parameters.height)
    colours = Image.fromarray(numbers.integers(0, 256, (4, 4, 3), np.uint8))
    painted = Image.fromarray(numbers.permutation([0, 255] * 8).astype(np.uint8).reshape(4, 4))
    squares = Image.Resampling.NEAREST
    mask = painted.resize(size, squares) if parameters.task == INPAINT else None
    return Inputs((colours.resize(size, squares),), mask)


def _difference(one: Generation, other: Generation) -> int:
    pairs = zip(_pixels(one), _pixels(other), strict=True)
    return max(int(np.abs(a.astype(int) - b.astype(int)).max()) for a, b in pairs)


def _pixels(generation: Generation) -> list[NDArray[np.uint8]]:
    frames = [video.frames for video in generation.videos]
    return [np.asarray(image) for image in generation.images] + frames
