"""The noise schedulers that a request may name for a model, and how one is made."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import diffusers
import numpy as np
import torch

from configs.fields import nearest
from workers.engine.arguments import arguments_of
from workers.patches import become, made_unset

HEUN = "FlowMatchHeunDiscreteScheduler"


_EULER = "FlowMatchEulerDiscreteScheduler"


MULTISTEP = (
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
)


SOLVERS = (_EULER, HEUN, *MULTISTEP)


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
        type(own).__name__ in MULTISTEP
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
        if scheduler.solver_name not in MULTISTEP
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


class _OfStage:
    """Goes by the sigmas of a stage; comes before the class of the scheduler."""

    staged_sigmas: tuple[float, ...]


def give_sigmas(scheduler: Any, sigmas: Sequence[float]) -> None:
    """Have a scheduler go by these sigmas, one for each step, in runs of so many steps.

    They stand for those that the pipeline or the scheduler would choose, before any shift. Runs of
    other numbers of steps stay as they are.

    Raises:
        ValueError: The class takes no sigmas, or not these.
    """
    kind, mu = type(scheduler), {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    if "sigmas" not in inspect.signature(kind.set_timesteps).parameters:
        raise ValueError(f"{kind.__name__} takes no sigmas")
    given = list(sigmas)
    scheduler.set_timesteps(sigmas=np.array(given), **mu)
    if len(scheduler.timesteps) < len(given):  # it wants the 0 at the end (Euler's)
        given.append(0.0)
    members = {
        "__module__": kind.__module__,
        "staged_sigmas": tuple(sigmas),
        "set_timesteps": _by_sigmas(kind.set_timesteps, given, len(sigmas)),
    }
    become(scheduler, kind.__name__, _OfStage, members)


def staged_sigmas(scheduler: Any) -> tuple[float, ...]:
    """Return the sigmas that a stage gave; none for the scheduler's own."""
    return scheduler.staged_sigmas if isinstance(scheduler, _OfStage) else ()


def _by_sigmas(
    set_timesteps: Callable[..., None], given: Sequence[float], steps: int
) -> Callable[..., None]:
    # The pipelines look at the signature to see whether sigmas may be given.
    @functools.wraps(set_timesteps)
    def set_given(
        self: Any, num_inference_steps: int | None = None, device: Any = None, **others: Any
    ) -> None:
        chosen = others.get("sigmas")
        if (num_inference_steps if chosen is None else len(chosen)) != steps:
            set_timesteps(self, num_inference_steps, device=device, **others)
            return
        set_timesteps(self, device=device, **{**others, "sigmas": np.array(given)})

    return set_given


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


# Of few steps, for weights or adapters that were distilled for them: never chosen, only named.
# Weights that are saved with one give noise with any other.
DISTILLED = ("LCMScheduler", "TCDScheduler")
_DISTILLED_STEPS = 50  # their default of `original_inference_steps`


# Pipelines that begin within the schedule count Heun's two calls a sigma in two ways: some begin
# twice as far as `strength` says.
_FROM_THE_FIRST_STEP = frozenset((HEUN,))


def offered_schedulers(own: Any, pipeline_classes: Iterable[Any]) -> tuple[str, ...]:
    """Return the model's own scheduler, then those that read its configuration rightly.

    `pipeline_classes` are those of its tasks.
    """
    name = type(own).__name__
    if name in DISTILLED:
        return (name,)
    if is_flow(own):
        plain = all(steps_plainly(each) for each in pipeline_classes)
        return (name, *(other for other in SOLVERS if plain and other != name))
    if own.config.get("prediction_type") == "flow_prediction" or own.config.get("use_flow_sigmas"):
        return (name,)
    compatible = {found.__name__ for found in own.compatibles}
    found = [other for other in USUAL if other in compatible - {name}]
    return (name, *found, *(DISTILLED if found else ()))


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


def nearest_scheduler(name: str, known: Iterable[str]) -> str | None:
    """Return the known class that was probably meant, by what is before their common word."""
    stems = {each.removesuffix("Scheduler").lower(): each for each in known}
    near = nearest(name.removesuffix("Scheduler"), stems)
    return None if near is None else stems[near]


def most_steps(own: Any, names: Iterable[str]) -> dict[str, int]:
    """Return the most steps of a whole run, of those of `names` that have such a limit.

    They run some of the steps that they were distilled from.
    """
    most = int(own.config.get("original_inference_steps", _DISTILLED_STEPS))
    return {name: most for name in names if name in DISTILLED}


@functools.cache
def _eta_of(step: Any) -> float | None:
    """The default of a step's share of new noise; None where it has none."""
    parameter = inspect.signature(step).parameters.get("eta")
    return None if parameter is None else float(parameter.default)


def step_arguments(pipe: Any) -> dict[str, Any]:
    """Return what the call of a pipeline gives to each step.

    `eta` is the stage's where it says one, else that of the scheduler: pipelines give 0, with which
    TCD draws no noise (its authors use 0.3; Zheng et al. 2024).
    """
    usual = _eta_of(type(pipe.scheduler).step)
    if usual is None or "eta" not in arguments_of(type(pipe)):
        return {}
    eta = pipe.scheduler.config.get("eta", usual)
    return {"eta": eta} if eta else {}


def clips(own: Any) -> bool:
    """Tell whether the model's own scheduler cuts what it predicts to a range, as of pixels."""
    words = inspect.unwrap(type(own).step).__code__.co_names
    cut = own.config.get("clip_sample") and "clip_sample" in words
    return bool(cut or own.config.get("thresholding"))


# What a model was trained with, and whether it clips: never what another class has by default.
_NOT_BY_DEFAULT = frozenset(
    (
        "beta_start",
        "beta_end",
        "beta_schedule",
        "trained_betas",
        "num_train_timesteps",
        "prediction_type",
        "rescale_betas_zero_snr",
        "clip_sample",
    )
)


# The solver's own business, in words that DEIS and the others refuse of each other.
_SOLVER_WORDS = ("algorithm_type", "solver_type")
_DEIS = "DEISMultistepScheduler"


def config_for(own: Any, name: str) -> dict[str, Any]:
    """Return the configuration of the model's own scheduler as a class of another name needs it.

    What a pipeline of diffusers set right in it stays, though it is the default of no class. Only
    where the model's own clips the other does: latents are larger than the range, and the default
    of some classes is to clip.
    """
    config = dict(own.config)
    usual = inspect.signature(type(own).__init__).parameters
    left = [
        key
        for key in config.get("_use_default_values", ())
        if key in usual and config.get(key) == usual[key].default
    ]
    if name != type(own).__name__:
        words = inspect.unwrap(type(own).step).__code__.co_names
        if "clip_sample" not in words:
            config["clip_sample"] = False
        left = [key for key in left if key not in _NOT_BY_DEFAULT]
        if _DEIS in (name, type(own).__name__):
            config = {key: value for key, value in config.items() if key not in _SOLVER_WORDS}
    config["_use_default_values"] = [key for key in left if key in config]
    return config


def made_scheduler(own: Any, name: str) -> Any:
    """Return a new scheduler, one of those offered for the model's own one."""
    if name == type(own).__name__:
        # The configuration is never changed in place.
        return copy.deepcopy(own, {id(own.config): own.config})
    if is_flow(own):
        return solved_by(own, name)
    config = {key: value for key, value in config_for(own, name).items() if key != "eta"}
    return made_unset(getattr(diffusers, name), config)
