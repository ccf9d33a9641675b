"""The engine on the bundled model: what it makes, and that equal requests make equal images."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from configs.errors import GenerationFailed
from configs.parameters import Parameters
from tests.engine.conftest import MakeParameters
from tests.engine.recorder import Recorder
from workers.engine.engine import Engine, Generation
from workers.engine.progress import Interrupted
from workers.engine.schedulers import DISTILLED, USUAL
from workers.outputs import encode


def pixels(generation: Generation, index: int = 0):
    return np.asarray(generation.images[index]).astype(int)


@pytest.mark.parametrize(
    ("prompt", "centre", "corner"),
    [
        ("a red circle on a blue background", 0, 2),
        ("a blue square on a red background", 2, 0),
        ("a green triangle on a red background", 1, 0),
    ],
)
def test_the_image_shows_what_the_prompt_says(
    engine: Engine, parameters: MakeParameters, prompt: str, centre: int, corner: int
):
    made = engine.generate(parameters(prompt=prompt, num_inference_steps=20), Recorder())
    assert made.images[0].size == (64, 64)
    assert pixels(made)[32, 32].argmax() == centre
    assert pixels(made)[2, 2].argmax() == corner


def test_abilities_are_those_of_the_bundled_model(engine: Engine):
    abilities = engine.abilities
    assert abilities.tasks == ("text-to-image", "image-to-image", "inpaint")
    assert (abilities.size_multiple, abilities.default_width, abilities.default_height) == (
        8,
        64,
        64,
    )
    assert (abilities.default_steps, abilities.default_guidance_scale) == (20, 3.0)
    assert (abilities.negative_prompt, abilities.guidance_scale) == (True, True)
    assert not abilities.true_cfg_scale
    assert abilities.schedulers == (*USUAL, *DISTILLED)
    assert abilities.max_prompt_tokens == 24


def test_every_scheduler_it_offers_makes_the_image(engine: Engine, parameters: MakeParameters):
    pictures = []
    for scheduler in engine.abilities.schedulers:
        asked = parameters(scheduler=scheduler, num_inference_steps=12)
        made = engine.generate(asked, Recorder())
        assert made.scheduler == scheduler
        # 57 where latents are clipped, 6 at most of those that draw noise of their own.
        pictures.append(pixels(made).astype(float))
        assert np.abs(pictures[-1] - pictures[0]).mean() < 10, scheduler
        assert pixels(made)[32, 32].argmax() == 0, scheduler
        assert pixels(made)[2, 2].argmax() == 2, scheduler


def test_the_same_seed_gives_the_same_file_also_after_an_interrupted_run(
    engine: Engine, parameters: MakeParameters
):
    asked = parameters(scheduler="DPMSolverMultistepScheduler")
    before = engine.generate(asked, Recorder())
    with pytest.raises(Interrupted):
        engine.generate(parameters(scheduler=asked.scheduler, seed=9), Recorder(stop_at=4))
    torch.manual_seed(99)
    after = engine.generate(asked, Recorder())
    files = [encode(made.images[0], asked, {}) for made in (before, after)]
    assert files[0] == files[1]


def test_another_seed_gives_another_image(engine: Engine, parameters: MakeParameters):
    made = [engine.generate(parameters(seed=seed), Recorder()) for seed in (1, 2)]
    assert np.abs(pixels(made[0]) - pixels(made[1])).max() > 8


@pytest.mark.parametrize("deterministic", [True, False])
def test_four_threads_at_once_make_what_each_makes_alone(
    busy_engine: Engine, parameters: MakeParameters, deterministic: bool
):
    engine = busy_engine
    usual = [
        parameters(prompt="a red circle on a blue background", seed=1),
        parameters(prompt="a green square on a red background", seed=2, num_inference_steps=9),
        parameters(prompt="a blue star", seed=3, scheduler="EulerAncestralDiscreteScheduler"),
        parameters(prompt="a heart", seed=4, guidance_scale=1.0, width=48),
    ]
    asked = [each.with_changes({"deterministic": deterministic}) for each in usual]
    alone = [engine.generate(each, Recorder()) for each in asked]
    start = threading.Barrier(4)

    def together(each: Parameters):
        start.wait(timeout=30)
        return [engine.generate(each, Recorder()) for _ in range(2)]

    with ThreadPoolExecutor(4) as pool:
        for expected, repeated in zip(alone, pool.map(together, asked), strict=True):
            for made in repeated:
                difference = np.abs(pixels(made) - pixels(expected)).max()
                assert difference <= (0 if deterministic else 1)
                assert made.batch_mean == 1.0 or not deterministic


def test_output_k_is_what_its_seed_makes_alone(engine: Engine, parameters: MakeParameters):
    asked = {"scheduler": "EulerAncestralDiscreteScheduler", "num_inference_steps": 8}
    together = engine.generate(parameters(seed=5, num_outputs_per_prompt=3, **asked), Recorder())
    assert together.seeds == (5, 6, 7)
    for index, seed in enumerate(together.seeds):
        alone = engine.generate(parameters(seed=seed, **asked), Recorder())
        assert np.abs(pixels(together, index) - pixels(alone)).max() <= 1


def test_the_noise_of_ancestral_steps_comes_from_the_seed(
    engine: Engine, parameters: MakeParameters
):
    asked = parameters(scheduler="EulerAncestralDiscreteScheduler")
    made = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        made.append(engine.generate(asked, Recorder()).images[0].tobytes())
    assert made[0] == made[1]


def test_a_run_leaves_the_global_random_state_alone(engine: Engine, parameters: MakeParameters):
    before = torch.get_rng_state()
    engine.generate(parameters(scheduler="EulerAncestralDiscreteScheduler"), Recorder())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["engine", "busy_engine"])
def test_each_part_is_timed(kind: str, request: pytest.FixtureRequest, parameters: MakeParameters):
    engine: Engine = request.getfixturevalue(kind)
    made = engine.generate(parameters(), Recorder())
    assert made.steps == 6
    assert min(made.encode_s, made.denoise_s, made.decode_s) > 0
    assert made.denoise_s > made.decode_s
    assert made.batch_mean == 1.0


def test_a_prompt_that_is_too_long_warns_with_the_number_of_tokens(
    engine: Engine, parameters: MakeParameters
):
    prompt = "red " * 40
    limit = engine.abilities.max_prompt_tokens or 0
    made = engine.generate(parameters(prompt=prompt, negative_prompt="blue"), Recorder())
    # Forty words are forty tokens; the start and the end take two places more.
    assert made.warnings == (
        f"prompt: the last {42 - limit} tokens were cut, because the model reads at most {limit}",
    )
    assert engine.generate(parameters(prompt="red " * (limit - 2)), Recorder()).warnings == ()


def test_what_the_pipeline_does_not_take_is_left_out_with_a_warning(
    engine: Engine, parameters: MakeParameters
):
    made = engine.generate(parameters(true_cfg_scale=2.0), Recorder())
    assert made.warnings == (
        "true_cfg_scale: StableDiffusionPipeline does not support it; it was ignored",
    )


def test_a_scheduler_that_does_not_fit_is_named(engine: Engine, parameters: MakeParameters):
    with pytest.raises(GenerationFailed, match="FlowMatchEulerDiscreteScheduler does not fit"):
        engine.generate(parameters(scheduler="FlowMatchEulerDiscreteScheduler"), Recorder())


def test_warming_up_makes_the_default_size(engine: Engine):
    engine.warm_up()
