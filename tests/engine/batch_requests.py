"""Requests that may start together: of one output each, of several, and from images."""

from collections.abc import Callable
from typing import Any

from configs.parameters import FROM_IMAGE_TASKS, IMAGE_TO_IMAGE, INPAINT, TEXT_TO_IMAGE, Parameters
from scripts.lab.family_trial import small_inputs
from tests.engine.batches import TIMEOUT_S
from workers.engine.arguments import Inputs
from workers.engine.engine import Generation

PROMPTS = ("a red circle on a blue background", "a star", "a green heart on a white ground", "x")
OUTPUTS = (2, 1, 3)
TASKS = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT)


def one_output_each(parameters: Callable[..., Parameters]) -> list[Parameters]:
    return [parameters(prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]


def several_outputs(parameters: Callable[..., Parameters]) -> list[Parameters]:
    """Requests of 2, 1 and 3 outputs, with seeds far apart."""
    return [
        parameters(prompt=prompt, seed=10 * index, num_outputs_per_prompt=outputs)
        for index, (prompt, outputs) in enumerate(zip(PROMPTS, OUTPUTS, strict=False))
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
