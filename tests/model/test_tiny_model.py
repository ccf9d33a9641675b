"""The shipped tiny model, loaded like any other: it is small and draws what it is told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from scripts.lab.check_tiny import Sampling, choose_specs, draw_samples, load, swapped_share
from scripts.lab.tiny_model.picture_check import check_picture

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
HOW = Sampling(steps=20, guidance=2.0)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return load(FOLDER)


def test_the_model_is_at_most_six_megabytes():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 6_000_000


def test_it_is_a_plain_diffusers_pipeline(pipeline: Any):
    assert type(pipeline).__name__ == "StableDiffusionPipeline"
    assert type(pipeline.vae).__name__ == "AutoencoderTiny"
    assert pipeline.scheduler.config.steps_offset == 1


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_it_draws_in_any_precision(dtype: torch.dtype | None):
    # Loaded without a precision, both libraries must agree on one.
    chosen = {} if dtype is None else {"torch_dtype": dtype}
    loaded = DiffusionPipeline.from_pretrained(FOLDER, local_files_only=True, **chosen)
    expected = dtype or torch.float32
    assert {m.dtype for m in (loaded.unet, loaded.vae, loaded.text_encoder)} == {expected}
    prompt = "a red circle on a blue background"
    image = loaded(
        prompt,
        num_inference_steps=10,
        guidance_scale=2.0,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    assert check_picture(image, prompt).ok


def test_held_out_prompts_are_drawn_right(pipeline: Any):
    samples = draw_samples(pipeline, choose_specs(24, held_out=True, seed=1), HOW)
    wrong = [sample.spec for sample in samples if not sample.verdict.ok]
    assert len(wrong) <= 3, wrong
    assert swapped_share(samples) <= 0.1


def test_the_prompt_of_the_readme_is_drawn_right(pipeline: Any):
    prompt = "a red circle on a blue background"
    generator = torch.Generator().manual_seed(7)
    image = pipeline(
        prompt, num_inference_steps=20, guidance_scale=2.0, generator=generator
    ).images[0]
    assert image.size == (64, 64)
    assert check_picture(image, prompt).ok


def test_the_same_seed_gives_the_same_picture(pipeline: Any):
    first, second = (
        pipeline(
            "a white star on a green background",
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(3),
        ).images[0]
        for _ in range(2)
    )
    assert first.tobytes() == second.tobytes()
