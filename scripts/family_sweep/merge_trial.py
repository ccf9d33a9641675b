"""Tries whether requests of one saved pipeline share their steps, and come out as alone."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from configs.stages import ReplicaPlan
from routing.parameters import Parameters
from routing.tasks import FROM_IMAGE_TASKS, VIDEO_TASKS
from scripts.families.trial import Watcher, pixels, small_inputs, together
from workers.denoiser.merging import Unmergeable, layout
from workers.devices.device_chunk import denoisers
from workers.engine.engine import Engine

ROUNDING = 1
_STEPS = 4
# Longest that a call waits for others; theirs may be of another kind.
_PATIENCE_S = 20.0
_STRENGTH = 0.7
# Of the last, the text is longer.
_PROMPTS = ("a red cat", "a blue dog", "a gold fish in the tall blue sea")


def small_request(
    engine: Engine, task: str, called_with: Mapping[str, Any], **changes: Any
) -> Parameters:
    """Return parameters of few steps, as a test calls its pipeline."""
    abilities = engine.abilities
    values: dict[str, Any] = {
        "prompt": _PROMPTS[0],
        "seed": 3,
        "task": task,
        "width": abilities.default_width,
        "height": abilities.default_height,
        "num_inference_steps": _STEPS,
        "num_frames": abilities.default_frames if task in VIDEO_TASKS else None,
        "fps": abilities.default_fps if task in VIDEO_TASKS else None,
    }
    if abilities.guidance_scale:
        values["guidance_scale"] = called_with.get("guidance_scale", 3.0)
    if task in FROM_IMAGE_TASKS and abilities.strength:
        values["strength"] = _STRENGTH
    return Parameters(**{**values, **changes})


def try_to_merge(plan: ReplicaPlan, task: str, called_with: Mapping[str, Any]) -> str:
    """Return why requests of a task do not share their steps, be the prompts equally long or not.

    Empty where they do, and come out as each does alone.
    """
    merged, reason = _merge_prompts(plan, task, called_with, _PROMPTS)
    if merged or reason.startswith("WRONG"):
        return reason
    merged, reason = _merge_prompts(plan, task, called_with, _PROMPTS[:2] + _PROMPTS[:1])
    return "if the prompts are equally long" if merged else reason


def _merge_prompts(
    plan: ReplicaPlan, task: str, called_with: Mapping[str, Any], prompts: tuple[str, ...]
) -> tuple[bool, str]:
    # Anew: what an engine measured on a busy machine may keep it from merging.
    engine, reasons = Engine.load(plan), list[str]()
    for denoiser in denoisers(engine._pipe).values():
        denoiser.register_forward_pre_hook(_looks(denoiser, reasons), with_kwargs=True)
    asked = [
        small_request(engine, task, called_with, prompt=prompt, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    if asked[0].strength is not None:  # so few steps have no share that shows much
        asked = [each.with_changes({"strength": 1.0}) for each in asked]
    alone = [engine.generate(each, Watcher(), small_inputs(task)) for each in asked]
    before = engine.rendezvous.histogram
    made = together(engine, asked, _PATIENCE_S)
    shared = {
        size: count - before.get(size, 0)
        for size, count in engine.rendezvous.histogram.items()
        if size > 1
    }
    pairs = zip(made, alone, strict=True)
    worst = max(int(np.abs(pixels(one) - pixels(other)).max()) for one, other in pairs)
    if worst > ROUNDING:
        return False, f"WRONG: merged, pixels differ by {worst}"
    if reasons:
        return False, f"no: there is no rule for `{reasons[0]}`"
    if not any(shared.values()) or min(each.batch_mean for each in made) == 1:
        return False, "no: merged, outputs differ by more than rounding"
    return True, ""


def _looks(denoiser: Any, reasons: list[str]) -> Any:
    names = list(inspect.signature(type(denoiser).forward).parameters)[1:]

    def look(_: Any, args: Any, kwargs: Any) -> None:
        try:
            layout({**dict(zip(names, args, strict=False)), **kwargs})
        except Unmergeable as error:
            reasons.append(error.name)

    return look
