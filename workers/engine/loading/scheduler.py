"""The noise scheduler of a model: its own, with what the stage says and what is known of it."""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import diffusers
import torch

from configs.errors import ModelLoadFailed
from configs.fields import choices, nearest
from configs.known_models import Figure
from configs.scheduler_fields import SHIFTS, SchedulerSettings
from configs.stage_config import EngineArgs
from workers.engine.known_settings import Defaults
from workers.engine.loading.dtypes import STAGE
from workers.engine.schedulers import (
    DISTILLED,
    MULTISTEP,
    SOLVERS,
    config_for,
    give_sigmas,
    is_flow,
    nearest_scheduler,
)
from workers.failures import short_cause

logger = logging.getLogger(__name__)

# Pipelines of these have an image begin with `scale_noise`, and give a `mu`, or sigmas: the solvers
# of the others lack the one and refuse the other, and are for pipelines that were made with them.
_FLOW_MATCH: Final = ("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler")
_AS_SOLVER: Final = (
    " (over the model's own schedule: leave it out, and set default_sampling_params.scheduler: {})"
)


@dataclass(frozen=True)
class ChosenScheduler:
    """How the scheduler of a model differs from the one that is saved with it.

    Attributes:
        settings: What the stage or the table of known settings says, by name: its `value`, the
            `saved` one and the `source`.
        steps: Number of the stage's sigmas; 0 where there are none.
    """

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: int = 0

    def with_steps(self, defaults: Defaults, staged: Mapping[str, Any]) -> Defaults:
        """Return the defaults with as many steps as there are sigmas.

        Raises:
            ModelLoadFailed: `staged`, the stage's `default_sampling_params`, say another number.
        """
        if not self.steps:
            return defaults
        said = staged.get("num_inference_steps", self.steps)
        if said != self.steps:
            raise ModelLoadFailed(
                f"default_sampling_params.num_inference_steps: {said} is not the number of"
                f" engine_args.scheduler.sigmas, which is {self.steps}; make them agree, or leave"
                " it out"
            )
        return replace(
            defaults,
            values={**defaults.values, "num_inference_steps": self.steps},
            sources={**defaults.sources, "num_inference_steps": STAGE},
        )


def set_scheduler(pipe: Any, args: EngineArgs, known: Figure | None) -> ChosenScheduler:
    """Give `pipe` the scheduler that its stage describes, and log how it differs from its own.

    `known` is the shift of the noise that suits the model; what the stage says comes first.

    Raises:
        ModelLoadFailed: The class does not fit the model, or an option the class.
    """
    staged, own = args.scheduler or SchedulerSettings(), pipe.scheduler
    kind = _kind(own, args.model, staged.class_name)
    options, saved = _options(own, kind, args.model, staged), _saved(own, kind)
    sources = dict.fromkeys(options, STAGE)
    name = _shift_of(kind)
    if known is not None and not options.keys() & {*SHIFTS, "use_dynamic_shifting"}:
        if name is None or not _shifts(name, saved):
            logger.info(
                "scheduler of %s: the shift %s (%s) has no effect with it",
                args.model,
                known.value,
                known.source,
            )
        else:
            options[name], sources[name] = known.value, known.source
    changed = {key: value for key, value in options.items() if saved.get(key) != value}
    if changed or kind is not type(own):
        with _refused(args.model, kind):
            made = kind.from_config(saved, **changed)
            if "eta" in changed:
                made.register_to_config(eta=changed["eta"])
        pipe.scheduler = made
    if staged.sigmas:
        with _refused(args.model, kind, "sigmas"):
            give_sigmas(pipe.scheduler, staged.sigmas)
        options["sigmas"], sources["sigmas"] = list(staged.sigmas), STAGE
    if staged.class_name is not None:
        options, sources = {"class": kind.__name__, **options}, {"class": STAGE, **sources}
    was = {**saved, "class": type(own).__name__, **_own_shift(own, name)}
    settings = {
        key: {"value": value, "saved": was.get(key), "source": sources[key]}
        for key, value in options.items()
    }
    _log(args.model, settings)
    return ChosenScheduler(settings, len(staged.sigmas))


def _kind(own: Any, model: str, name: str | None) -> Any:
    """The class that a stage names, where it can step what the model predicts."""
    if name in (None, type(own).__name__):
        return type(own)
    names = _replacements(own)
    kind = getattr(diffusers, name, None) if name in names else None
    fault = None if kind is None else _step_fault(own, kind)
    if kind is not None and fault is None:
        return kind
    fitting = [
        each
        for each in names
        if each == type(own).__name__ or _step_fault(own, getattr(diffusers, each)) is None
    ]
    near = nearest_scheduler(str(name), fitting)
    predicts = "a flow" if _is_flow(own) else own.config.get("prediction_type", "its own")
    raise ModelLoadFailed(
        f"{model}: engine_args.scheduler.class: {name!r} does not fit a model that predicts"
        f" {predicts} (its own scheduler is {type(own).__name__})"
        f"{f': {fault}' if fault else ''}; {f'did you mean {near}? ' if near else ''}"
        f"use {choices(fitting)}"
        f"{_AS_SOLVER.format(name) if _is_flow(own) and name in SOLVERS else ''}"
    )


def _is_flow(own: Any) -> bool:
    return is_flow(own) or type(own).__name__ in _FLOW_MATCH[1:]


def _replacements(own: Any) -> tuple[str, ...]:
    """The classes that may stand in the place of `own`, by what diffusers says of them."""
    found: tuple[str, ...]
    if _is_flow(own):
        found = _FLOW_MATCH if type(own).__name__ in _FLOW_MATCH else (*_FLOW_MATCH, *MULTISTEP)
    else:
        found = tuple(each.__name__ for each in own.compatibles)
        found = (*found, *DISTILLED) if "DDIMScheduler" in found else found
    return tuple(dict.fromkeys((type(own).__name__, *found)))


def _step_fault(own: Any, kind: Any) -> str | None:
    """Why a scheduler of that class cannot step what the model predicts; None where it can."""
    try:
        scheduler = kind.from_config(_saved(own, kind))
        mu = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
        scheduler.set_timesteps(2, **mu)
        timestep, sample = scheduler.timesteps[0], torch.ones(1, 1, 8, 8)
        if hasattr(scheduler, "scale_model_input"):
            sample = scheduler.scale_model_input(sample, timestep)
        scheduler.step(sample, timestep, sample)
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        return short_cause(error)
    return None


def _saved(own: Any, kind: Any) -> dict[str, Any]:
    """The configuration of the model's own scheduler, in the words of another class.

    A flow is written in two ways: the classes named for it have a `shift`, and the solvers are told
    to go by a flow and have a `flow_shift`. Both shift a sigma s to n s / (1 + (n - 1) s).
    """
    config = config_for(own, kind.__name__)
    if kind is type(own) or not _is_flow(own):
        return config
    name = _shift_of(kind)
    if name == "flow_shift":
        config |= {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    return {**config, **_own_shift(own, name)}


def _own_shift(own: Any, name: str | None) -> dict[str, Any]:
    said = next((own.config[each] for each in SHIFTS if each in own.config), None)
    return {} if name is None or said is None else {name: said}


def _takes(kind: Any) -> list[str]:
    return [name for name in inspect.signature(kind.__init__).parameters if name != "self"]


def _shift_of(kind: Any) -> str | None:
    return next((name for name in SHIFTS if name in _takes(kind)), None)


def _shifts(name: str, config: Mapping[str, Any]) -> bool:
    """Whether the shift counts: it does not where it goes by the size, or there is no flow."""
    flows = name == "shift" or bool(config.get("use_flow_sigmas"))
    return flows and not config.get("use_dynamic_shifting")


def _options(own: Any, kind: Any, model: str, staged: SchedulerSettings) -> dict[str, Any]:
    """The stage's options by the names that the class has for them.

    Raises:
        ModelLoadFailed: The class has no such option, or it would do nothing.
    """
    known, shift = _takes(kind), _shift_of(kind)
    if "eta" in inspect.signature(kind.step).parameters:
        known.append("eta")
    options = dict[str, Any]()
    for said, value in staged.options.items():
        name = shift if shift and said in SHIFTS else said
        if name not in known:
            near = nearest(name, known)
            raise ModelLoadFailed(
                f"{model}: engine_args.scheduler.{name}: {kind.__name__} has no such option;"
                f" {f'did you mean {near}? ' if near else ''}use {choices(['sigmas', *known])}"
            )
        options[name] = value
    if shift in options and not _shifts(shift, {**_saved(own, kind), **options}):
        dynamic = {**own.config, **options}.get("use_dynamic_shifting")
        fix = "use_dynamic_shifting: false" if dynamic else "use_flow_sigmas: true"
        raise ModelLoadFailed(
            f"{model}: engine_args.scheduler.{shift}: {options[shift]} has no effect with this"
            f" scheduler; leave it out, or add {fix}"
        )
    return options


@contextmanager
def _refused(model: str, kind: Any, key: str = "") -> Iterator[None]:
    """Say which key of the stage it was that diffusers refused."""
    try:
        yield
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        where = f"engine_args.scheduler{key and f'.{key}'}"
        message = f"{model}: {where}: {kind.__name__} refuses it: {short_cause(error)}"
    else:
        return
    raise ModelLoadFailed(message)


def _log(model: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
    for name, said in settings.items():
        differs = said["value"] != said["saved"]
        logger.log(
            logging.WARNING if differs and said["source"] != STAGE else logging.INFO,
            "scheduler of %s: %s %s (%s)%s",
            model,
            name,
            said["value"],
            said["source"],
            f"; saved with the model is {said['saved']}"
            if differs and said["saved"] is not None
            else "",
        )
