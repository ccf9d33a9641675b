"""The requests that a replica makes before it serves any: of each warm-up size, and in company.

Knows no pipelines that run.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from configs.errors import ModelLoadFailed
from configs.pipeline_settings import WarmupShape
from routing.parameters import Abilities, Parameters
from routing.tasks import FROM_IMAGE_TASKS, INPAINT
from workers.engine.inputs import Inputs

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
        self._steps = min(abilities.default_steps, steps or _STEPS)

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
                    f"{multiple}, as the model needs it"
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
            raise ModelLoadFailed(f"{written} has frames, and the model makes images")
        if (frames - 1) % abilities.frames_step:
            raise ModelLoadFailed(
                f"{written} has not 1 frame and a multiple of {abilities.frames_step} more, as the"
                " model needs it"
            )
        if abilities.max_frames and frames > abilities.max_frames:
            raise ModelLoadFailed(
                f"{written} has more than the {abilities.max_frames} frames that the model makes"
            )

    def in_company(self, task: str) -> Parameters:
        """Return one of the default size that shows whether a task may be run in company."""
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
            num_frames=frames and (shape.num_frames or frames),
            fps=abilities.default_fps,
            # Of so few steps a share may be none.
            strength=1.0 if task in FROM_IMAGE_TASKS and abilities.strength else None,
        )


def _gray_inputs(parameters: Parameters) -> Inputs:
    size = (parameters.width, parameters.height)
    return Inputs(
        images=(Image.new("RGB", size, "gray"),) if parameters.task in FROM_IMAGE_TASKS else (),
        mask=Image.new("L", size, "white") if parameters.task == INPAINT else None,
    )
