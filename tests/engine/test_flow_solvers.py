"""Flow models under other solvers than their own: against an exact solution, and in each family.

The exact one: where data is normal with mean m and deviation s in each dimension, the samples at
sigma are (1 - sigma) m + d(sigma) z, with d(sigma)^2 = (1 - sigma)^2 s^2 + sigma^2, and the noise z
begun with is the same all along. The derivative by sigma is the velocity.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    CosmosTextToWorldPipeline,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    LTXConditionPipeline,
    StableDiffusionPipeline,
    UniPCMultistepScheduler,
    WanPipeline,
)

from configs.errors import GenerationFailed
from configs.parameters import (
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINT,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
    Parameters,
)
from scripts.lab.family_trial import (
    Watcher,
    load_folder,
    pixels,
    small_inputs,
    small_request,
    together,
)
from tests.engine.conftest import SavedFamily
from workers.engine.engine import Engine
from workers.engine.schedulers import (
    HEUN,
    SOLVERS,
    USUAL,
    calls_of,
    made_scheduler,
    offered_schedulers,
)

MEAN, SPREAD = torch.tensor([1.0, -2.0, 0.5, 0.0]), torch.tensor([0.05, 0.3, 1.0, 2.0])
EULER = "FlowMatchEulerDiscreteScheduler"
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
# Schedulers as models come with them, and how their pipelines set the timesteps.
OWN: dict[str, tuple[Any, Any]] = {
    "sd3": (FlowMatchEulerDiscreteScheduler(shift=3.0), lambda steps: {}),
    "flux": (
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        lambda steps: {"sigmas": np.linspace(1, 1 / steps, steps), "mu": 0.8},
    ),
    "ltx": (
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        lambda steps: {"sigmas": np.linspace(1, 1 / steps, steps), "mu": 1.2},
    ),
    "wan": (UniPCMultistepScheduler(**FLOW, flow_shift=3.0), lambda steps: {}),
    "sana": (DPMSolverMultistepScheduler(**FLOW, flow_shift=3.0), lambda steps: {}),
}
# The flow models of docs/models.md, but Qwen-Image-Edit, whose loop is that of Qwen-Image. The
# pipelines of a family's tasks have the same loop, which begins later where there is a strength:
# FLUX and Stable Diffusion 3 show that.
CASES = [
    ("stable_diffusion_3", IMAGE_TO_IMAGE),
    *(("flux", task) for task in (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT)),
    ("flux_kontext", TEXT_TO_IMAGE),
    ("qwen_image", TEXT_TO_IMAGE),
    ("sana", TEXT_TO_IMAGE),
    ("z_image", TEXT_TO_IMAGE),
    ("wan", TEXT_TO_VIDEO),
    ("wan_image_to_video", IMAGE_TO_VIDEO),
    ("ltx", TEXT_TO_VIDEO),
]


def sample(noise: torch.Tensor, sigma: Any) -> torch.Tensor:
    noisy: torch.Tensor = (1 - sigma) * MEAN + deviation(sigma) * noise
    return noisy


def deviation(sigma: Any) -> torch.Tensor:
    return torch.sqrt((1 - sigma) ** 2 * SPREAD**2 + sigma**2)


def velocity(value: torch.Tensor, sigma: Any) -> torch.Tensor:
    slope = (sigma - (1 - sigma) * SPREAD**2) / deviation(sigma) ** 2
    result: torch.Tensor = slope * (value - (1 - sigma) * MEAN) - MEAN
    return result


def largest_error(own: Any, name: str, steps: int, arguments: Any, begin: float = 0.0) -> float:
    """Integrate from that share of the schedule on; return how far from the right end it comes.

    All schedulers go from the last sigma to 0 by Euler's step, the right end does so too: LTX has a
    last sigma that does not vanish.
    """
    scheduler = made_scheduler(own, name)
    scheduler.set_timesteps(steps, **arguments)
    first = int(begin * len(scheduler.timesteps))
    scheduler.set_begin_index(first)
    noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    value = sample(noise, scheduler.sigmas[first])
    for index, timestep in enumerate(scheduler.timesteps[first:], first):
        assert scheduler.sigmas[index] * 1000 == pytest.approx(float(timestep), abs=1.01)
        value = scheduler.step(
            velocity(value, scheduler.sigmas[index]), timestep, value, return_dict=False
        )[0]
    last = scheduler.sigmas[-2]
    end = sample(noise, last) - last * velocity(sample(noise, last), last)
    return float((value - end).abs().max())


@pytest.mark.parametrize("model", OWN)
@pytest.mark.parametrize(
    ("name", "begin"),
    [*((name, 0.0) for name in SOLVERS), *((name, 0.4) for name in SOLVERS if name != HEUN)],
)
def test_solvers_end_where_the_flow_ends(name: str, model: str, begin: float):
    own, arguments = OWN[model]
    coarse, fine, finest = (
        largest_error(own, name, steps, arguments(steps), begin) for steps in (8, 32, 128)
    )
    euler = [largest_error(own, EULER, steps, arguments(steps), begin) for steps in (8, 32)]
    if name == EULER:
        assert euler == [coarse, fine]
        assert coarse / 4.5 < fine < coarse / 3
    else:
        assert coarse < euler[0]
        assert fine < euler[1] / 4
    assert finest < fine / 2.5


@pytest.mark.parametrize("model", OWN)
def test_a_solver_keeps_the_schedule_of_the_model(model: str):
    own, arguments = OWN[model]
    own.set_timesteps(7, **arguments(7))
    for name in offered_schedulers(own, ())[1:]:
        scheduler = made_scheduler(own, name)
        scheduler.set_timesteps(7, **arguments(7))
        assert type(scheduler).__name__ == name
        assert isinstance(scheduler, type(own))
        assert scheduler.config == own.config
        assert torch.equal(scheduler.timesteps.unique(), own.timesteps.unique())
        assert torch.equal(scheduler.sigmas.unique(), own.sigmas.unique())
        assert len(scheduler.timesteps) == (13 if name == HEUN else 7) == calls_of(scheduler, 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_reckons_in_float32_and_runs_again(name: str, dtype: torch.dtype):
    scheduler = made_scheduler(OWN["sd3"][0], name)
    ends = []
    for _ in range(2):
        scheduler.set_timesteps(4)
        value = torch.ones(2, 4, dtype=dtype)
        for timestep in scheduler.timesteps:
            value = scheduler.step(-value, timestep, value).prev_sample
            assert value.dtype == dtype
        ends.append(value)
    assert torch.equal(*ends)
    assert torch.isfinite(value).all()


@pytest.mark.parametrize("name", SOLVERS)
def test_a_pipeline_may_write_the_next_sample_over_the_last(name: str):
    """As SkyReels-V2 does, frame by frame; solvers of the second order come back to the last."""
    ends = []
    for overwrites in (False, True):
        scheduler = made_scheduler(OWN["sd3"][0], name)
        scheduler.set_timesteps(5)
        value = torch.linspace(-1, 1, 8).reshape(1, 8)
        for timestep in scheduler.timesteps:
            stepped = scheduler.step(-value.sin(), timestep, value, return_dict=False)[0]
            value = value.copy_(stepped) if overwrites else stepped
        ends.append(value)
    assert torch.equal(*ends)


def test_the_list_goes_by_the_schedule_and_by_what_the_pipeline_gives_the_step():
    flow, plain = FlowMatchEulerDiscreteScheduler, [FluxPipeline]
    assert offered_schedulers(flow(), plain) == SOLVERS
    wan = offered_schedulers(OWN["wan"][0], [WanPipeline])
    assert (wan[0], set(wan)) == ("UniPCMultistepScheduler", set(SOLVERS))
    for own, pipelines in (
        (flow(invert_sigmas=True), plain),
        (flow(stochastic_sampling=True), plain),
        (UniPCMultistepScheduler(**FLOW, final_sigmas_type="sigma_min"), plain),
        (UniPCMultistepScheduler(prediction_type="sample", use_flow_sigmas=True), plain),
        (flow(), [FluxPipeline, LTXConditionPipeline]),
        (flow(), [CosmosTextToWorldPipeline]),
    ):
        assert offered_schedulers(own, pipelines) == (type(own).__name__,)
    usual = offered_schedulers(DDIMScheduler(), [StableDiffusionPipeline])
    assert {"HeunDiscreteScheduler", "DEISMultistepScheduler"} < set(usual)
    assert not any(name.startswith("FlowMatch") for name in usual)


def smooth(pipe: Any) -> None:
    """Make a denoiser of random weights as smooth in time as a trained one is."""
    denoisers = [pipe.transformer]
    if getattr(pipe, "transformer_2", None) is not None:
        denoisers.append(pipe.transformer_2)
        # Where the one passes on to the other would depend on the steps.
        pipe.transformer_2.load_state_dict(pipe.transformer.state_dict())
    for part in (part for denoiser in denoisers for part in denoiser.modules()):
        if type(part).__name__ in {"Timesteps", "TimestepEmbedder"}:
            part.register_forward_pre_hook(lambda _, args: (args[0] / 1000, *args[1:]))


@pytest.fixture(scope="module")
def engines(saved: SavedFamily) -> Callable[[str], Engine]:
    """Loads each family once, when it is first asked for."""

    def load(name: str) -> Engine:
        pipe, engine = load_folder(saved(name))
        smooth(pipe)
        return engine

    return cache(load)


@pytest.mark.parametrize(("family", "task"), CASES)
def test_the_solvers_of_a_family_make_the_picture_of_many_euler_steps(
    engines: Any, family: str, task: str
):
    engine = engines(family)
    abilities, inputs = engine.abilities, small_inputs(task)

    def made(name: str, steps: int, strength: float = 1.0) -> Any:
        # Guidance would multiply what random weights do unevenly in time.
        true_cfg_scale = 1.0 if abilities.true_cfg_scale else None
        asked = small_request(
            abilities,
            task,
            num_inference_steps=steps,
            scheduler=name,
            true_cfg_scale=true_cfg_scale,
        )
        if abilities.supports_strength(task):
            asked = asked.with_changes({"strength": strength})
        return pixels(engine.generate(asked, Watcher(), inputs))

    def distance(one: Any, other: Any) -> float:
        return float(np.abs(one - other).mean())

    exact = made(EULER, 60)
    coarse, euler = distance(made(EULER, 3), exact), distance(made(EULER, 16), exact)
    assert euler < coarse / 3
    names = set(abilities.schedulers_for(task))
    assert names == set(SOLVERS) - ({HEUN} if abilities.supports_strength(task) else set())
    for name in names - {EULER}:
        assert distance(made(name, 16), exact) < euler
    if abilities.supports_strength(task):
        few, many = made(EULER, 12, 0.5), made(EULER, 48, 0.5)
        for name in names - {EULER}:
            apart = distance(made(name, 12, 0.5), few)
            assert distance(made(name, 48, 0.5), many) < apart / 2


@pytest.mark.parametrize("family", sorted({name for name, _ in CASES}))
def test_requests_of_other_solvers_that_run_together_make_what_each_makes_alone(
    engines: Any, family: str
):
    engine = engines(family)
    task = engine.abilities.tasks[0]
    asked = [
        small_request(engine.abilities, task, seed=seed, num_inference_steps=5, scheduler=name)
        for seed, name in enumerate(engine.abilities.schedulers_for(task))
    ]
    alone = [engine.generate(each, Watcher(), small_inputs(task)) for each in asked]
    for one, other in zip(together(engine, asked), alone, strict=True):
        assert np.abs(pixels(one) - pixels(other)).max() <= 1
        assert one.scheduler == other.scheduler
    assert [each.scheduler for each in alone] == [each.scheduler for each in asked]


def test_heun_tells_its_two_calls_a_step_and_is_refused_where_a_run_begins_later(engines: Any):
    engine = engines("flux")
    watcher = Watcher()
    asked = small_request(engine.abilities, "text-to-image", scheduler=HEUN)
    engine.generate(asked, watcher)
    assert watcher.calls == [(0, 3), *((step, 5) for step in range(6))]
    for task in (IMAGE_TO_IMAGE, INPAINT):
        later = small_request(engine.abilities, task, scheduler=HEUN)
        with pytest.raises(GenerationFailed, match=f"{HEUN} does not fit {task}"):
            engine.generate(later, Watcher(), small_inputs(task))


def test_routing_weighs_what_schedulers_call():
    once = Parameters(prompt="a star", seed=0, width=8, height=8, num_inference_steps=4)
    for name in (*USUAL, *SOLVERS):
        asked = once.with_changes({"scheduler": name})
        assert asked.work() * 4 == once.work() * calls_of(getattr(diffusers, name), 4), name
