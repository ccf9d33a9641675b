"""Schedulers that are offered are right: by a denoiser that knows the picture, and by diffusers."""

from typing import Any

import diffusers
import pytest
import torch

from scripts.lab.families import FAMILIES
from workers.engine.loading.scheduler_check import right_schedulers, scheduler_fault
from workers.engine.schedulers import DISTILLED, clips, made_scheduler, offered_schedulers

LATENT = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
LINEAR = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
V = {"prediction_type": "v_prediction"}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
UNRESCALED = {
    "HeunDiscreteScheduler",
    "DPMSolverSinglestepScheduler",
    "DEISMultistepScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
}
# What is saved with models, by who has it, and the classes that are not offered for it.
SAVED: dict[str, tuple[Any, set[str]]] = {
    "Stable Diffusion 1": (
        diffusers.PNDMScheduler(
            **LATENT, set_alpha_to_one=False, skip_prk_steps=True, steps_offset=1
        ),
        set(),
    ),
    "Stable Diffusion 2": (
        diffusers.DDIMScheduler(
            **LATENT, **V, clip_sample=False, set_alpha_to_one=False, steps_offset=1
        ),
        set(),
    ),
    "SDXL": (
        diffusers.EulerDiscreteScheduler(**LATENT, steps_offset=1, timestep_spacing="leading"),
        set(),
    ),
    "SDXL Turbo": (
        diffusers.EulerAncestralDiscreteScheduler(**LATENT, timestep_spacing="trailing"),
        set(),
    ),
    "PixArt": (diffusers.DPMSolverMultistepScheduler(**LINEAR), set()),
    "Latte": (diffusers.DDIMScheduler(**LINEAR, clip_sample=False), set()),
    "HunyuanDiT": (
        diffusers.DDPMScheduler(
            beta_start=0.00085,
            beta_end=0.018,
            beta_schedule="scaled_linear",
            clip_sample=False,
            steps_offset=1,
            **V,
        ),
        set(),
    ),
    "Kandinsky 2": (
        diffusers.DDPMScheduler(
            beta_start=0.00085, beta_end=0.012, clip_sample=True, clip_sample_range=2.0
        ),
        set(),
    ),
    "an UniPC": (diffusers.UniPCMultistepScheduler(**LATENT), set()),
    "a DEIS": (diffusers.DEISMultistepScheduler(**LATENT), set()),
    "a Karras SDE": (
        diffusers.DPMSolverMultistepScheduler(
            **LATENT, use_karras_sigmas=True, algorithm_type="sde-dpmsolver++"
        ),
        set(),
    ),
    "a DDIM that ends without the picture": (
        diffusers.DDIMScheduler(**LATENT, **V, **ZERO_SNR, clip_sample=False),
        UNRESCALED,
    ),
    "an Euler that ends without the picture": (
        diffusers.EulerDiscreteScheduler(**LATENT, **V, **ZERO_SNR),
        UNRESCALED,
    ),
    "one that predicts the picture": (
        diffusers.DDIMScheduler(prediction_type="sample", clip_sample=False),
        {
            "EulerAncestralDiscreteScheduler",
            "KDPM2DiscreteScheduler",
            "KDPM2AncestralDiscreteScheduler",
        },
    ),
    "Stable Diffusion 3": (diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), set()),
    "FLUX": (
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        set(),
    ),
    "Wan": (diffusers.UniPCMultistepScheduler(**FLOW), set()),
    "Sana": (diffusers.DPMSolverMultistepScheduler(**FLOW), set()),
}
# Read from a file in which what was the default of its time is left out.
OLD = ("Stable Diffusion 1", "PixArt", "one that predicts the picture")
CASES = [*((name, True) for name in SAVED), *((name, False) for name in OLD)]


def whole(own: Any) -> Any:
    """As it is read from a file that says every entry."""
    said = {key: value for key, value in own.config.items() if key != "_use_default_values"}
    return type(own).from_config(said)


@pytest.mark.parametrize(("name", "all_said"), CASES)
def test_what_is_offered_for_a_saved_configuration(name: str, all_said: bool):
    saved, left_out = SAVED[name]
    own = whole(saved) if all_said else saved
    found = right_schedulers(own, ())
    assert found[0] == type(own).__name__
    assert set(offered_schedulers(own, ())) - set(found) == left_out
    for other in found[1:]:
        made = made_scheduler(own, other)
        assert not clips(made) or clips(own), other
        if hasattr(own, "alphas_cumprod"):
            assert torch.allclose(made.alphas_cumprod, own.alphas_cumprod, atol=1e-4), other


def test_cogvideox_is_offered_its_own_alone():
    """Its own moves the course of the noise by a factor that no other class has."""
    own = diffusers.CogVideoXDDIMScheduler(**LATENT, **V, **ZERO_SNR, snr_shift_scale=3.0)
    assert right_schedulers(whole(own), ()) == ("CogVideoXDDIMScheduler",)


def test_deepfloyd_whose_denoiser_tells_its_variance_is_offered_what_reads_it():
    own = diffusers.DDPMScheduler(
        beta_schedule="squaredcos_cap_v2",
        variance_type="learned_range",
        thresholding=True,
        dynamic_thresholding_ratio=0.95,
        sample_max_value=1.5,
    )
    found = right_schedulers(whole(own), ())
    assert found[0] == "DDPMScheduler"
    assert not {"EulerDiscreteScheduler", "DDIMScheduler", *DISTILLED} & set(found)


@pytest.mark.parametrize("scheduler", ["DDIMScheduler", "DDPMScheduler"])
def test_one_that_clips_latents_fails_its_check(scheduler: str):
    own = diffusers.DDPMScheduler(**LATENT, clip_sample=False)
    assert scheduler_fault(own, scheduler) is None
    cut = getattr(diffusers, scheduler)(**LATENT, clip_sample=True, clip_sample_range=0.1)
    assert clips(cut)
    fault = scheduler_fault(cut, "DDIMScheduler")
    assert fault is not None
    assert "away from the picture" in fault


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("stable_diffusion", "Stable Diffusion 1"),
        ("stable_diffusion", "Stable Diffusion 2"),
        ("stable_diffusion", "Latte"),  # whose offset this constructor sets right
        ("stable_diffusion", "a DEIS"),
        ("stable_diffusion", "Kandinsky 2"),  # whose clipping this constructor turns off
        ("pixart", "PixArt"),
        ("pixart", "SDXL"),
        ("pixart", "a Karras SDE"),
    ],
)
def test_each_is_what_the_constructor_of_the_pipeline_would_make_of_it(family: str, name: str):
    """But that diffusers clips latents by default, and that DEIS and DPM refuse each other's."""
    built = FAMILIES[family]()

    def constructed(scheduler: Any) -> Any:
        return type(built)(**{**built.components, "scheduler": scheduler}).scheduler

    own = constructed(whole(SAVED[name][0]))
    for other in set(offered_schedulers(own, ())[1:]) - SAVED[name][1]:
        made = made_scheduler(own, other).config
        deis = "DEIS" in other + type(own).__name__
        try:
            expected = constructed(getattr(diffusers, other).from_config(own.config)).config
        except (NotImplementedError, ValueError):
            assert deis, other
            continue
        said = {key for key in {**made, **expected} if not key.startswith("_")}
        differ = {key for key in said if made.get(key) != expected.get(key)}
        differ -= {"solver_type", "algorithm_type"} if deis else set()
        assert not differ or (differ == {"clip_sample"} and not clips(own)), other
