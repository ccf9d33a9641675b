"""The requests that a replica makes before it serves any, and what they check."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from configs.errors import ModelLoadFailed
from configs.parameters import FROM_IMAGE_TASKS, INPAINT, Abilities, Lora, Parameters
from configs.stage_fields import WarmupShape
from workers.engine.arguments import Inputs
from workers.engine.generation import Generation
from workers.engine.progress import Interrupted, SilentProgress
from workers.engine.run import Slot

_logger = logging.getLogger(__name__)


_STEPS = 2


class WarmUpRequests:
    """Makes parameters and inputs that fit a model's abilities."""

    def __init__(
        self, abilities: Abilities, shapes: Sequence[WarmupShape], *, steps: int | None = None
    ) -> None:
        """Make requests of the model's default size and of `shapes`, in two steps.

        With `steps`, in so many, though never in more than are usual for the model.
        """
        self._abilities = abilities
        self._usual = WarmupShape(abilities.default_width, abilities.default_height)
        self._shapes = dict.fromkeys((self._usual, *shapes))
        most = abilities.scheduler_steps.get(abilities.schedulers[0], abilities.default_steps)
        self._steps = min(abilities.default_steps, steps or _STEPS, most)

    def of_each_size(self) -> Iterator[tuple[Parameters, Inputs]]:
        """Yield one request of each size, the default one first.

        Raises:
            ModelLoadFailed: A size is not one that the model makes.
        """
        multiple = self._abilities.size_multiple
        for shape in self._shapes:
            if shape.width % multiple or shape.height % multiple:
                raise ModelLoadFailed(
                    f"engine_args.warmup_shapes: {shape.width}x{shape.height} is not a multiple of "
                    f"{multiple}, which the model needs"
                )
            self._check_frames(shape)
            parameters = self._parameters(shape)
            yield parameters, _gray_inputs(parameters)

    def _check_frames(self, shape: WarmupShape) -> None:
        frames, abilities = shape.num_frames, self._abilities
        if frames is None:
            return
        written = f"engine_args.warmup_shapes: {shape.width}x{shape.height}x{frames}"
        if abilities.default_frames is None:
            raise ModelLoadFailed(f"{written} has frames, but the model makes images")
        if (frames - 1) % abilities.frames_step:
            raise ModelLoadFailed(
                f"{written} has not 1 frame and a multiple of {abilities.frames_step} more, as the"
                " model needs it"
            )
        if abilities.max_frames and frames > abilities.max_frames:
            raise ModelLoadFailed(
                f"{written} has more than the {abilities.max_frames} frames that the model makes"
            )

    def in_batch(self, task: str) -> Parameters:
        """Return one of the default size that shows whether a task may be run in a batch."""
        changes: dict[str, Any] = {"task": task, "strength": None}
        if self._abilities.negative_prompt:
            changes["negative_prompt"] = ""
        if task in FROM_IMAGE_TASKS and self._abilities.strength:
            # Two steps from half way, where the image still shows.
            changes |= {"strength": 0.5, "num_inference_steps": 4}
        return self._parameters(self._usual).with_changes(changes)

    def _parameters(self, shape: WarmupShape) -> Parameters:
        abilities = self._abilities
        task, frames = abilities.tasks[0], abilities.default_frames
        return Parameters(
            prompt="warm-up",
            seed=0,
            task=task,
            width=shape.width,
            height=shape.height,
            num_inference_steps=self._steps,
            guidance_scale=abilities.default_guidance_scale if abilities.guidance_scale else None,
            true_cfg_scale=abilities.default_true_cfg_scale,
            num_frames=frames and (shape.num_frames or frames),
            fps=abilities.default_fps,
            lora=tuple(Lora(**each) for each in abilities.default_lora or ()),
            # Of so few steps a share may be none.
            strength=1.0 if task in FROM_IMAGE_TASKS and abilities.strength else None,
        )


def _gray_inputs(parameters: Parameters) -> Inputs:
    size = (parameters.width, parameters.height)
    return Inputs(
        images=(Image.new("RGB", size, "gray"),) if parameters.task in FROM_IMAGE_TASKS else (),
        mask=Image.new("L", size, "white") if parameters.task == INPAINT else None,
    )


_PROMPTS = ("warm-up", "a red circle on a blue ground", "one")


# Steps between 0 and 255 that may lie between a picture made alone and one made in a batch, in any
# pixel.
_ROUNDING = {"float32": 2, "float64": 2}


# Coarser types round single pixels, at edges above all, by any number of steps. So there it is the
# root mean square that counts: up to twice the step between two numbers near 1, and no less than
# the rounding to pixels may make of any difference...
_LEAST, _LEAST_STEPS = 2.0, 1.0


# ... or as much as that of a batch of copies, which differ by rounding only, times this.
_AS_MUCH = 2.5


class _Leaver(SilentProgress):
    def on_step(self, step: int, steps: int) -> None:
        if step:
            raise Interrupted("it leaves")


def is_right_in_batch(
    parameters: Parameters,
    dtype: str,
    alone: Callable[[Parameters, Inputs], Generation],
    together: Callable[[Sequence[Slot]], Sequence[Generation]],
) -> bool:
    """Make outputs like `parameters` both ways; whatever goes wrong together means no.

    An output is one row of the call whosever it is, so requests of one output speak for those of
    several. Each gets a negative prompt of its own if `parameters` have one.
    """
    asked = [(_own(parameters, seed), _inputs(parameters, seed)) for seed in range(len(_PROMPTS))]
    expected = [alone(*each) for each in asked[:2]]
    try:
        worst, allowed = _measured(dtype, together(_slots(asked)), expected)
        if worst > allowed and dtype not in _ROUNDING:
            copies = together(_slots(asked[:1] * len(asked)))
            allowed = max(allowed, _AS_MUCH * max(_spread(each, expected[0]) for each in copies))
    except Exception as error:  # noqa: BLE001 - alone the model serves all the same
        _logger.warning(
            "%s: requests do not start together, for that failed: %s", parameters.task, error
        )
        return False
    if worst > allowed:
        _logger.warning(
            "%s: requests do not start together, for that changes pixels by %.1f of 255, and"
            " rounding by %.1f at most",
            parameters.task,
            worst,
            allowed,
        )
        return False
    return True


def _slots(asked: Sequence[tuple[Parameters, Inputs]]) -> list[Slot]:
    """Requests of one batch, the last of which leaves."""
    watchers = (SilentProgress(), SilentProgress(), _Leaver())
    return [
        Slot(each, watcher, inputs) for (each, inputs), watcher in zip(asked, watchers, strict=True)
    ]


def _measured(
    dtype: str, made: Sequence[Generation], expected: Sequence[Generation]
) -> tuple[float, float]:
    """How far pictures are apart, and how far they may be, in steps between 0 and 255."""
    if dtype in _ROUNDING:
        return max(map(_difference, made, expected)), _ROUNDING[dtype]
    step = 255 * torch.finfo(getattr(torch, dtype)).eps
    return max(map(_spread, made, expected)), max(_LEAST * step, _LEAST_STEPS)


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


def _spread(one: Generation, other: Generation) -> float:
    """The root mean square of the differences of all pixels of a picture, of the worst one."""
    pairs = zip(_pixels(one), _pixels(other), strict=True)
    return max(float(np.sqrt(np.square(a.astype(float) - b).mean())) for a, b in pairs)


def _pixels(generation: Generation) -> list[NDArray[np.uint8]]:
    frames = [video.frames for video in generation.videos]
    return [np.asarray(image) for image in generation.images] + frames
