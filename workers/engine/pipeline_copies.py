"""The pipelines of one model, and the copy of one that each run gets.

Copies share the weights and have a noise scheduler of their own. Knows no requests that run.
"""

import copy
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

from configs.errors import GenerationFailed
from routing.parameters import Abilities, Parameters
from routing.tasks import FROM_IMAGE_TASKS, INPAINT
from workers.engine.company import company_arguments, company_of, takes_company
from workers.engine.inputs import Inputs
from workers.engine.noise_schedulers import made_scheduler
from workers.engine.pipeline_arguments import arguments_of, left_out
from workers.engine.pipeline_tasks import task_pipelines
from workers.engine.prompt_limit import cut_warnings, prompt_limits
from workers.engine.seat import Seat

_TEXTS_KEPT = 256


class PipelineCopies:
    """Makes copies of a loaded pipeline, and the arguments they are called with."""

    def __init__(self, pipe: Any, abilities: Abilities) -> None:
        """Copy `pipe` and those that other tasks make of its parts."""
        self._pipe = pipe
        self._abilities = abilities
        # Prompts, and negative ones above all, come again.
        self._cut_warnings = lru_cache(_TEXTS_KEPT)(partial(cut_warnings, prompt_limits(pipe)))
        self._pipes = task_pipelines(pipe)
        self._kinds = {task: _settled(each) for task, each in self._pipes.items()}

    def copy_for(self, parameters: Parameters, inputs: Inputs) -> Any:
        """Return a copy for one run.

        Raises:
            GenerationFailed: The model has not the task or the scheduler, or an input is missing.
        """
        task = parameters.task
        if task not in self._pipes:
            raise GenerationFailed(f"task: {task} is none of {', '.join(self._pipes)}")
        if task in FROM_IMAGE_TASKS and not inputs.images:
            raise GenerationFailed(f"image: {task} needs one")
        if task == INPAINT and inputs.mask is None:
            raise GenerationFailed(f"mask_image: {task} needs one")
        pipe = self._copy_with_scheduler(task, parameters.scheduler)
        pipe.__class__ = self._kinds[task]
        return pipe

    @property
    def tasks_for_company(self) -> list[str]:
        """Tasks whose pipelines may be called for several requests at once."""
        return [task for task, pipe in self._pipes.items() if takes_company(task, type(pipe))]

    def company(self, seat: Seat) -> Hashable:
        """Return what it has in common with those it may start with; None where it is alone."""
        return company_of(seat.parameters, seat.inputs, type(self._pipes[seat.parameters.task]))

    def arguments(self, seats: Sequence[Seat]) -> dict[str, Any]:
        """Return the arguments of one call for requests of one company."""
        return company_arguments(seats, type(self._pipes[seats[0].parameters.task]))

    def prompt_warnings(self, parameters: Parameters) -> list[str]:
        """Return sentences on what the pipeline leaves out or cuts; uses the tokenizers."""
        kind = type(self._pipes[parameters.task])
        warnings = [
            f"{name}: {kind.__name__} takes none; it was left out"
            for name in left_out(parameters, kind)
        ]
        for name in ("prompt", "negative_prompt"):
            if name in arguments_of(kind):
                warnings += self._cut_warnings(name, getattr(parameters, name))
        return warnings

    def _copy_with_scheduler(self, task: str, name: str | None) -> Any:
        own, fitting = self._pipe.scheduler, self._abilities.schedulers_for(task)
        name = name or type(own).__name__
        if name not in (type(own).__name__, *fitting):
            raise GenerationFailed(
                f"scheduler: {name} does not fit {task} of the model; {', '.join(fitting)} do"
            )
        scheduler = made_scheduler(own, name)
        pipe = copy.copy(self._pipes[task])
        # Not by setattr, which would register the scheduler in the configuration.
        pipe.__dict__["scheduler"] = scheduler
        # What it does for one pipeline alone would be done to all that share the parts.
        pipe.__dict__["maybe_free_model_hooks"] = _nothing
        return pipe


def _settled(pipe: Any) -> Any:
    """Return the class of `pipe` with the device that it runs on written down.

    Pipelines ask every module of every part for it, several times in a call, and it never changes
    once they are loaded: milliseconds of each request, all of them under the interpreter's lock.
    """
    kind = type(pipe)
    own = {"_execution_device": pipe._execution_device, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


def _nothing() -> None:
    pass
