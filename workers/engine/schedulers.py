"""The noise schedulers that a request may name for a model, and how one is made."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import diffusers
import torch

from workers.patches import become

HEUN = "FlowMatchHeunDiscreteScheduler"


_EULER = "FlowMatchEulerDiscreteScheduler"


_MULTISTEP = (
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
)


SOLVERS = (_EULER, HEUN, *_MULTISTEP)


# What pipelines read or pass that belongs to their own scheduler's step alone.
_FOREIGN_WORDS = frozenset(
    ("per_token_timesteps", "pred_original_sample", "model_outputs", "last_sample", "_step_index")
)


# Solvers in the logarithm of (1 - sigma) / sigma begin this much below 1, as UniPC does by itself.
_BELOW_ONE = 1e-6


# BDF2 is stable while no step is 1 + sqrt(2) times the one before (Grigorieff 1983). Schedules that
# end just above 0 (SD3, Sana) leap further in the step before the last, and there two-step formulas
# do worse than Euler's.
_LONGEST_STEP = 2.0


def is_flow(own: Any) -> bool:
    """Tell whether a scheduler integrates a velocity without noise, from sigma 1 down to 0."""
    config = own.config
    if type(own).__name__ == _EULER:
        return not (config.invert_sigmas or config.stochastic_sampling)
    return (
        type(own).__name__ in _MULTISTEP
        and bool(config.use_flow_sigmas)
        and config.prediction_type == "flow_prediction"
        and config.final_sigmas_type == "zero"
    )


def steps_plainly(pipeline_class: Any) -> bool:
    """Tell whether a pipeline gives the step a velocity, a timestep and a sample, and no more."""
    code = inspect.unwrap(pipeline_class.__call__).__code__
    keywords = (words for words in code.co_consts if isinstance(words, tuple))
    return _FOREIGN_WORDS.isdisjoint(
        (*code.co_names, *(word for each in keywords for word in each))
    )


def solved_by(own: Any, name: str) -> Any:
    """Return a copy of a flow model's scheduler whose steps are those of the scheduler `name`.

    One of `SOLVERS`. The copy is an instance of a class of that name too. Its `order` is 2 for
    Heun's method, which calls the denoiser twice for each sigma but the last.
    """
    scheduler = copy.deepcopy(own)
    members: dict[str, Any] = {"__module__": __name__, "solver_name": name}
    if name == HEUN:
        members |= {"order": 2, "set_timesteps": _twice_each(type(own).set_timesteps)}
    become(scheduler, name, _Solved, members)
    return scheduler


class _Solved:
    """Makes the steps of another scheduler; comes before the class of the model's own."""

    solver_name: str
    step_index: Any
    timesteps: torch.Tensor
    sigmas: torch.Tensor
    _step_index: int
    _init_step_index: Callable[[Any], None]
    _solver: Any
    _leaps: frozenset[int]

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Any,
        sample: torch.Tensor,
        generator: Any = None,
        return_dict: bool = True,
    ) -> Any:
        """Return the sample at the next sigma, in the dtype of `model_output`.

        Args:
            model_output: The velocity, noise minus sample.
            timestep: Of `timesteps`; read in the first step, where no index was set to begin at.
            sample: At the current sigma, of the same shape.
            generator: Not read.
            return_dict: Whether an object with `prev_sample` is returned, and not a tuple.
        """
        if self.step_index is None:
            self._init_step_index(timestep)
            self._solver = _solver(self)
            self._leaps = _leaps(self._solver.sigmas)
        if self._step_index in self._leaps:
            self._solver.lower_order_nums = 0  # begins anew with a step of the first order
        # In float32, for multistep solvers subtract outputs that are nearly equal. Of its own, for
        # solvers come back to the sample, and a pipeline may write the next one over it.
        own = sample.to(torch.float32, copy=True)
        stepped = self._solver.step(
            model_output.float(), self._solver.timesteps[0], own, return_dict=False
        )[0].to(model_output.dtype)
        self._step_index += 1
        if not return_dict:
            return (stepped,)
        return diffusers.schedulers.scheduling_utils.SchedulerOutput(prev_sample=stepped)


def _solver(scheduler: _Solved) -> Any:
    """Return a solver at the start of the run that `scheduler` is about to begin."""
    kind = getattr(diffusers, scheduler.solver_name)
    solver = (
        kind()
        if scheduler.solver_name not in _MULTISTEP
        else kind(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            solver_order=2,
            lower_order_final=True,
        )
    )
    solver.set_timesteps(len(scheduler.timesteps))
    sigmas = scheduler.sigmas.to("cpu", torch.float32, copy=True)
    solver.sigmas = sigmas.clamp(max=1 - _BELOW_ONE)
    # As many as there are, which the last steps go by; an index says where the solver is.
    solver.timesteps = sigmas[:-1]
    solver.set_begin_index(scheduler.step_index)
    return solver


def _leaps(sigmas: torch.Tensor) -> frozenset[int]:
    """Return the steps that are far longer than the one before, in log((1 - sigma) / sigma)."""
    times = torch.logit(1 - sigmas.double())
    steps = times.diff()
    return frozenset((1 + (steps[1:] > _LONGEST_STEP * steps[:-1]).nonzero().flatten()).tolist())


def _twice_each(set_timesteps: Callable[..., None]) -> Callable[..., None]:
    """Make `set_timesteps` repeat each but the first and the last, as Heun's method goes."""

    # The pipelines look at the signature to see whether sigmas may be given.
    @functools.wraps(set_timesteps)
    def set_twice(self: Any, *args: Any, **kwargs: Any) -> None:
        set_timesteps(self, *args, **kwargs)
        timesteps, sigmas = self.timesteps, self.sigmas
        self.timesteps = torch.cat([timesteps[:1], timesteps[1:].repeat_interleave(2)])
        self.sigmas = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])

    return set_twice


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
