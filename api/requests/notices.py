"""What a client is told when a request is accepted: what it asked for that will have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from api.models.catalog import ServedModel
from configs.parameters import Parameters


def notices(given: Mapping[str, Any], values: Parameters, model: ServedModel) -> list[str]:
    """Return one sentence for each field that was given in vain, and for a strength that grew.

    Args:
        given: What the client said.
        values: The complete parameters.
        model: Which model.
    """
    return [
        *_about_strength(given, values, model),
        *_about_negative_prompt(given, values, model),
        *_about_length(given, model),
    ]


def _about_strength(
    given: Mapping[str, Any], values: Parameters, model: ServedModel
) -> Iterator[str]:
    usual = model.abilities.default_strength
    if "strength" in given or usual is None or values.strength is None:
        return
    steps = values.num_inference_steps
    if int(usual * steps) < 1 <= int(values.strength * steps):
        yield f"strength was raised from {usual:.3g} to {values.strength:.3g}, to run one step"


def _about_negative_prompt(
    given: Mapping[str, Any], values: Parameters, model: ServedModel
) -> Iterator[str]:
    abilities = model.abilities
    if not abilities.negative_prompt:
        return
    name = "true_cfg_scale" if abilities.true_cfg_scale else "guidance_scale"
    scale = getattr(values, name)
    if given.get("negative_prompt") and scale is not None and scale <= 1:
        yield f"negative_prompt has no effect, because {name} is {scale:g}; use more than 1"
    asked = given.get("true_cfg_scale")
    true_guidance = abilities.true_cfg_scale and asked is not None and asked > 1
    if true_guidance and not values.negative_prompt:
        yield "true_cfg_scale works against an empty negative prompt, because none is given"


def _about_length(given: Mapping[str, Any], model: ServedModel) -> Iterator[str]:
    """Count words, each of which is a token at least; how many are cut the replica says."""
    most = model.abilities.max_prompt_tokens
    if most is None:
        return
    for name in ("prompt", "negative_prompt"):
        words = len((given.get(name) or "").split())
        if words > most:
            yield f"{name} has {words} words, and the model reads {most} tokens at most"
