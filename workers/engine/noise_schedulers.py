"""The noise schedulers that a request may name for a model, and how one is made.

Knows no families; what a scheduler can do is read from its class and its configuration.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import diffusers

from workers.engine.flow_solvers import HEUN, SOLVERS, is_flow, solved_by, steps_plainly

USUAL = (
    "DDIMScheduler",
    "DDPMScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "DEISMultistepScheduler",
    "UniPCMultistepScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
)
# Models distilled for these give noise with any other.
_DISTILLED_SCHEDULERS = {"LCMScheduler", "TCDScheduler"}
# Pipelines that begin within the schedule count Heun's two calls a sigma in two ways: some begin
# twice as far as `strength` says.
_FROM_THE_FIRST_STEP = frozenset((HEUN,))


def offered_schedulers(own: Any, pipeline_classes: Iterable[Any]) -> tuple[str, ...]:
    """Return the model's own scheduler, then those that read its configuration rightly.

    `pipeline_classes` are those of its tasks.
    """
    name = type(own).__name__
    if name in _DISTILLED_SCHEDULERS:
        return (name,)
    if is_flow(own):
        plain = all(steps_plainly(each) for each in pipeline_classes)
        return (name, *(other for other in SOLVERS if plain and other != name))
    if own.config.get("prediction_type") == "flow_prediction" or own.config.get("use_flow_sigmas"):
        return (name,)
    compatible = {found.__name__ for found in own.compatibles}
    return (name, *(other for other in USUAL if other in compatible - {name}))


def from_first_step(names: Sequence[str]) -> tuple[str, ...]:
    """Return those but the first, the model's own, that begin at the first step only.

    No strength goes with them.
    """
    return tuple(name for name in names[1:] if name in _FROM_THE_FIRST_STEP)


def calls_of(scheduler: Any, steps: int) -> int:
    """Return how often a whole run of so many steps calls `scheduler`.

    Those of the second order call twice for each step but the last.
    """
    order = getattr(scheduler, "order", 1)
    return steps * order - (order - 1)


def made_scheduler(own: Any, name: str) -> Any:
    """Return a new scheduler, one of those offered for the model's own one."""
    if name == type(own).__name__:
        # The configuration is never changed in place.
        return copy.deepcopy(own, {id(own.config): own.config})
    if is_flow(own):
        return solved_by(own, name)
    return getattr(diffusers, name).from_config(own.config)
