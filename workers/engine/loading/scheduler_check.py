"""Which of the schedulers that are offered for a model find the picture that its denoiser knows."""

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from workers.engine.schedulers import clips, is_flow, made_scheduler, offered_schedulers

logger = logging.getLogger(__name__)

_STEPS: Final = 6
_SHAPE: Final = (1, 4, 4, 4)
# How far from the picture a run may end, of its mean size. Those of diffusers that are right end
# below 0.03 (PNDM, TCD and DEIS leave some noise), those that clip at 0.15 and above.
_FARTHEST: Final = 0.08
# Between the shares of the picture (root of alpha) that two schedulers see in one timestep: those
# that are rescaled to end without any keep 0.0002 of it or none, the others 0.05 and more.
_MOST_SHARE: Final = 0.01
_LEARNED: Final = ("learned", "learned_range")


def right_schedulers(own: Any, pipeline_classes: Iterable[Any]) -> tuple[str, ...]:
    """Return the model's own scheduler, then those offered for it that passed their check.

    Each is built and run with a denoiser that always knows the picture; what raises, ends beside
    the picture, or was made for another course of the noise is left out, with a line in the log.
    """
    name, *others = offered_schedulers(own, pipeline_classes)
    found = [name]
    for other in others:
        fault = scheduler_fault(own, other)
        if fault is None:
            found.append(other)
        else:
            logger.info("%s is not offered for this model: %s", other, fault)
    return tuple(found)


def scheduler_fault(own: Any, name: str) -> str | None:
    """Return why the scheduler `name` is wrong for a model with the scheduler `own`, else None."""
    try:
        scheduler = made_scheduler(own, name)
        if not is_flow(own) and _share_apart(own, scheduler) > _MOST_SHARE:
            return "it goes by another course of the noise than the model was trained for"
        away = _end_away(own, scheduler)
    except Exception as error:  # noqa: BLE001 - whatever a class of diffusers says of a configuration
        return f"{type(error).__name__}: {error}"[:200]
    if not away <= _FARTHEST:
        return f"it ends {away:.2g} of the picture's size away from the picture"
    return None


def _share_apart(own: Any, scheduler: Any) -> float:
    shares = [each.alphas_cumprod.clamp(min=0).sqrt() for each in (own, scheduler)]
    return float((shares[0] - shares[1]).abs().max())


@torch.no_grad()
def _end_away(own: Any, scheduler: Any) -> float:
    """Return how far from the picture a run of the scheduler ends, of the picture's mean size."""
    generator = torch.Generator().manual_seed(0)
    picture = torch.randn(_SHAPE, generator=generator)
    # Latents are larger than what is clipped; where the model's own clips, pictures are within.
    picture = picture.clamp(-1, 1) if clips(own) else 2 * picture
    dynamic = scheduler.config.get("use_dynamic_shifting")
    scheduler.set_timesteps(_STEPS, **({"mu": 1.0} if dynamic else {}))
    sample = torch.randn(_SHAPE, generator=generator) * getattr(scheduler, "init_noise_sigma", 1.0)
    scaled: Callable[..., Any] = getattr(scheduler, "scale_model_input", lambda given, _: given)
    draws = "generator" in inspect.signature(scheduler.step).parameters
    options = {"generator": generator} if draws else {}
    for timestep in scheduler.timesteps:
        said = _said(own, scheduler, picture, scaled(sample, timestep), float(timestep))
        sample = scheduler.step(said, timestep, sample, **options).prev_sample
    return float((sample - picture).abs().mean() / picture.abs().mean())


def _said(own: Any, scheduler: Any, picture: Any, sample: Any, timestep: float) -> Any:
    """What a denoiser that was trained with `own` and knows the picture says of a sample."""
    if is_flow(own):
        return (sample - picture) / (timestep / own.config.num_train_timesteps)
    known = own.alphas_cumprod
    alpha = known[min(max(round(timestep), 0), len(known) - 1)]
    signal, noise = alpha.sqrt(), (1 - alpha).sqrt()
    drawn = (sample - signal * picture) / noise
    kind = own.config.prediction_type
    said = {"sample": picture, "v_prediction": signal * drawn - noise * picture}.get(kind, drawn)
    if scheduler.config.get("variance_type") in _LEARNED:
        return torch.cat([said, torch.zeros_like(said)], 1)
    return said
