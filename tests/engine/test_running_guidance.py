"""Guidance that changes while a run goes on, held against other ways to come to the same."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideoPipeline, UNet2DConditionModel

from scripts.lab.families import FAMILIES
from scripts.lab.family_trial import pixels
from scripts.lab.image_families import stable_diffusion
from tests.engine.conftest import TIMEOUT_S, SavedFamily, patient
from tests.engine.guided_family import (
    AFTER,
    BEFORE,
    CHANGED_AT,
    Family,
    by_argument,
    by_attribute,
    by_halves,
    by_pairs,
    said,
    scale_of,
)
from tests.engine.recorder import Recorder, Steerer
from workers.engine.arguments import Inputs
from workers.engine.features.guidance import RunningGuidance
from workers.engine.run import Slot


@pytest.fixture(scope="module")
def families(saved: SavedFamily) -> Callable[[str], Family]:
    """Loads each family once, when it is first asked for."""
    return cache(lambda name: Family(name, saved(name)))


REFERENCES: dict[str, Callable[[Family], Any]] = {
    "stable_diffusion": by_attribute,
    "stable_diffusion_xl": by_attribute,
    "stable_diffusion_3": by_attribute,
    "flux": by_argument,
    "flux_kontext": by_argument,
    "qwen_image": by_pairs,
    "qwen_image_edit": by_pairs,
    "pixart": by_halves,
    "sana": by_halves,
    "z_image": by_attribute,
    "wan": by_pairs,
    "wan_image_to_video": by_pairs,
    "ltx": by_attribute,
    "latte": by_halves,
}


def test_every_family_is_tried():
    assert REFERENCES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_guidance_changed_between_two_steps_counts_from_there(
    families: Callable[[str], Family], name: str
):
    family = families(name)
    made, warnings = family.run(Steerer(CHANGED_AT, **{scale_of(name): AFTER}))
    assert warnings == ()
    reference = REFERENCES[name](family)
    moved = (family.raw() - reference).abs().max()
    assert moved > 1e-3
    assert (made - reference).abs().max() < 1e-2 * moved


@pytest.mark.parametrize("name", FAMILIES)
def test_guidance_changed_before_the_first_step_is_as_if_asked_for(
    families: Callable[[str], Family], name: str
):
    family, scale = families(name), scale_of(name)
    made, warnings = family.run(Steerer(0, **{scale: AFTER}))
    assert warnings == ()
    assert torch.equal(made, family.run(Recorder(), **{scale: AFTER})[0])


@pytest.mark.parametrize("name", ["flux", "sana", "wan", "z_image"])
def test_who_shares_forwards_with_a_changed_one_is_not_changed(
    families: Callable[[str], Family], name: str
):
    family = families(name)
    rendezvous, line = family.engine.rendezvous, family.engine.rendezvous.queue
    before = line.max_wait_s, line.wait_share
    asked = [family.asked.with_changes({"seed": seed, "num_inference_steps": 5}) for seed in (3, 4)]
    alone = [
        family.engine.generate(each, watcher, family.inputs)
        for each, watcher in zip(asked, (Steerer(2, guidance_scale=60.0), Recorder()), strict=True)
    ]
    plain = family.engine.generate(asked[0], Recorder(), family.inputs)
    assert np.abs(pixels(plain) - pixels(alone[0])).max() > 2
    line.max_wait_s = 0.0

    def be_patient() -> None:
        patient(rendezvous)

    start = threading.Barrier(2, action=be_patient)

    class Meeting(Steerer):
        """Goes on when both have made a step."""

        def on_step(self, step: int, steps: int) -> None:
            if step == 1:
                start.wait(TIMEOUT_S)
            super().on_step(step, steps)

    with ThreadPoolExecutor(2) as pool:
        made = list(
            pool.map(
                lambda each, watcher: family.engine.generate(each, watcher, family.inputs),
                asked,
                (Meeting(2, guidance_scale=60.0), Meeting(9)),
            )
        )
    line.max_wait_s, line.wait_share = before
    for one, other in zip(made, alone, strict=True):
        assert np.abs(pixels(one) - pixels(other)).max() <= 1
        assert one.batch_mean > 1
        assert one.warnings == ()


def test_the_true_scale_of_a_distilled_model_can_be_changed_beside_the_embedded_one(
    families: Callable[[str], Family],
):
    family, both = families("flux"), {"guidance_scale": 9.0, "true_cfg_scale": 5.0}
    plain = {"negative_prompt": "blue", "true_cfg_scale": 2.0}
    made, warnings = family.run(Steerer(0, **both), **plain)
    assert warnings == ()
    assert torch.equal(made, family.run(Recorder(), **{**plain, **both})[0])
    assert not torch.equal(made, family.run(Recorder(), **plain)[0])


def test_an_embedded_scale_may_be_nothing_at_first(families: Callable[[str], Family]):
    family = families("flux")
    made, warnings = family.run(Steerer(0, guidance_scale=4.0), guidance_scale=0.0)
    assert warnings == ()
    assert torch.equal(made, family.run(Recorder(), guidance_scale=4.0)[0])


def test_a_scale_that_is_taken_back_is_the_pipeline_s_own(families: Callable[[str], Family]):
    family = families("stable_diffusion")
    made, warnings = family.run(Steerer(0, guidance_scale=None))
    assert warnings == ()
    assert torch.equal(made, family.run(Recorder(), guidance_scale=7.5)[0])


def test_a_scale_can_be_changed_again_and_back(families: Callable[[str], Family]):
    class Wavering(Recorder):
        def guidance(self):
            return {"guidance_scale": {1: AFTER, 2: BEFORE}.get(self.calls[-1][0], BEFORE)}

    for name in ("stable_diffusion", "flux"):
        family = families(name)
        made, warnings = family.run(Wavering())
        assert warnings == ()
        plain = family.run(Recorder())[0]
        assert not torch.equal(made, plain)
        assert not torch.equal(made, family.run(Steerer(1, guidance_scale=AFTER))[0])


@pytest.mark.parametrize(
    ("name", "at", "changes", "wanted"),
    [
        pytest.param("qwen_image", 1, {"true_cfg_scale": 1.0}, {"true_cfg_scale": 9.0}, id="off"),
        pytest.param("qwen_image", 1, {}, {"guidance_scale": 9.0}, id="a scale that it ignores"),
        pytest.param("sana", 1, {}, {"true_cfg_scale": 9.0}, id="a scale that it does not take"),
        pytest.param("sana", 1, {}, {"guidance_scale": 1.0}, id="off from now on"),
        pytest.param("z_image", 0, {}, {"guidance_scale": 0.0}, id="off by another rule"),
        pytest.param("flux", 3, {}, {"guidance_scale": 9.0}, id="after the last step"),
    ],
)
def test_what_cannot_be_changed_is_said(
    families: Callable[[str], Family],
    name: str,
    at: int,
    changes: dict[str, Any],
    wanted: dict[str, Any],
):
    family = families(name)
    made, warnings = family.run(Steerer(at, **wanted), **changes)
    assert warnings == said(*next(iter(wanted.items())))
    assert torch.equal(made, family.run(Recorder(), **changes)[0])


def test_what_is_changed_while_it_is_decoded_is_said(families: Callable[[str], Family]):
    family = families("sana")

    class Late(Recorder):
        def guidance(self):
            return {"guidance_scale": AFTER} if family.latents else {}

    made, warnings = family.run(Late())
    assert warnings == said("guidance_scale", AFTER)
    assert torch.equal(made, family.run(Recorder())[0])


def test_a_scale_of_which_something_was_computed_before_the_loop_cannot_be_changed(tmp_path: Path):
    """Latent consistency models embed it into the steps they count by."""
    pipe = stable_diffusion()
    unet = UNet2DConditionModel.from_config(pipe.unet.config, time_cond_proj_dim=8)
    pipe.register_modules(unet=unet)
    pipe.save_pretrained(tmp_path)
    family = Family("stable_diffusion", tmp_path)
    made, warnings = family.run(Steerer(0, guidance_scale=AFTER))
    assert warnings == said("guidance_scale", AFTER)
    assert torch.equal(made, family.run(Recorder())[0])
    assert not torch.equal(made, family.run(Recorder(), guidance_scale=AFTER)[0])


@pytest.mark.parametrize(
    ("multiple", "first", "changes"),
    [(1000.0, 6.0, True), (0.1, 6.0, True), (542.0, 6.0, False), (1000.0, 0.0, False)],
)
def test_an_embedded_scale_is_multiplied_as_the_pipeline_did(
    multiple: float, first: float, changes: bool, families: Callable[[str], Family]
):
    """HunyuanVideo multiplies by 1000, in bfloat16."""
    asked = families("flux").asked.with_changes({"guidance_scale": first})
    slot = Slot(asked, Recorder(), Inputs())
    guidance = RunningGuidance([slot], {"guidance_scale": first}, HunyuanVideoPipeline)
    run: Any = SimpleNamespace(
        step=0, steps=3, latents=None, at_step=[], before_forward=[], rows_of=lambda _: slice(None)
    )
    guidance.enter_loop(run)
    guidance.steer(run, slot, {"guidance_scale": 7.3})

    def embedded(scale: float) -> torch.Tensor:
        return torch.tensor([scale] * 2, dtype=torch.bfloat16) * multiple

    (steered_call,) = run.before_forward
    steered = steered_call(torch.nn.Identity(), {"t": 1, "guidance": embedded(first)})
    assert steered["t"] == 1
    assert torch.equal(steered["guidance"], embedded(7.3 if changes else first))
