"""A tiny pipeline whose guidance changes, and ways to change it that know nothing of the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from scripts.lab.family_trial import load_folder, small_inputs, small_request
from workers.devices.chunk import denoisers
from workers.engine.arguments import call_arguments

BEFORE, AFTER, CHANGED_AT = 3.0, 9.0, 1


# Guided where they have a negative prompt.
TRUE_CFG = ("qwen_image", "qwen_image_edit")


def scale_of(name: str) -> str:
    return "true_cfg_scale" if name in TRUE_CFG else "guidance_scale"


def said(name: str, wanted: float) -> tuple[str, ...]:
    return (f"{name} could not be changed to {wanted:g} while running",)


class Family:
    """One tiny pipeline and a request for it; `latents` is what it decoded last."""

    def __init__(self, name: str, folder: Path) -> None:
        self.pipe, self.engine = load_folder(folder)
        self.denoisers = list(denoisers(self.pipe).values())
        changes: dict[str, Any] = {"negative_prompt": "blue"} if name in TRUE_CFG else {}
        task = self.engine.abilities.tasks[0]
        changes |= {scale_of(name): BEFORE, "num_inference_steps": 3}
        self.asked = small_request(self.engine.abilities, task, **changes)
        self.inputs = small_inputs(task)
        self.latents: list[torch.Tensor] = []
        decode = self.pipe.vae.decode

        def decoding(latents: torch.Tensor, *args: Any, **options: Any):
            self.latents.append(latents.flatten())
            return decode(latents, *args, **options)

        self.pipe.vae.decode = decoding

    def run(self, watcher: Any, **changes: Any):
        """What a run of the engine decodes, and its warnings."""
        self.latents.clear()
        made = self.engine.generate(self.asked.with_changes(changes), watcher, self.inputs)
        return torch.cat(self.latents), made.warnings

    def raw(self, **options: Any):
        """What a call of the bare pipeline decodes."""
        self.latents.clear()
        with torch.inference_mode():
            self.pipe(**call_arguments(self.asked, type(self.pipe), self.inputs), **options)
        return torch.cat(self.latents)


@contextmanager
def hooked(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def by_attribute(family: Family):
    """The pipeline reads its attribute at each step, and a callback sets that."""

    def change(pipe: Any, step: int, _: Any, values: Any):
        if step + 1 == CHANGED_AT:
            # As diffusers' guide to callbacks has it.
            pipe._guidance_scale = AFTER  # noqa: SLF001
        return values

    return family.raw(callback_on_step_end=change)


def by_halves(family: Family):
    """u + g (t' - u) is u + g' (t - u), where t' = u + g' / g (t - u)."""
    calls: list[None] = []

    def change(_: Any, __: Any, output: Any):
        calls.append(None)
        if len(calls) <= CHANGED_AT:
            return None
        without, of_text = output[0].chunk(2)
        return (torch.cat([without, without + AFTER / BEFORE * (of_text - without)]),)

    with hooked([each.register_forward_hook(change) for each in family.denoisers]):
        return family.raw()


def by_pairs(family: Family):
    """u' + g (t - u') is u + g' (t - u), where u' = (u (1 - g') + t (g' - g)) / (1 - g)."""
    outputs: list[Any] = []

    def change(_: Any, __: Any, output: Any):
        outputs.append(output[0])
        if len(outputs) % 2 or len(outputs) <= 2 * CHANGED_AT:
            return None
        of_text, without = outputs[-2:]
        return ((without * (1 - AFTER) + of_text * (AFTER - BEFORE)) / (1 - BEFORE),)

    with hooked([each.register_forward_hook(change) for each in family.denoisers]):
        return family.raw()


def by_argument(family: Family):
    """The denoiser gets the scale."""
    calls: list[None] = []

    def change(_: Any, args: Any, kwargs: Any):
        calls.append(None)
        if len(calls) <= CHANGED_AT:
            return None
        assert kwargs["guidance"].tolist() == [BEFORE]
        return args, {**kwargs, "guidance": torch.tensor([AFTER])}

    hooks = [each.register_forward_pre_hook(change, with_kwargs=True) for each in family.denoisers]
    with hooked(hooks):
        return family.raw()
