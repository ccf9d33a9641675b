"""The watched scheduler: diffusers must not notice that it is watched."""

import copy
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import EulerAncestralDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from PIL.Image import Image

from configs.parameters import Parameters
from scripts.lab.families import save_family
from tests.engine.conftest import plan
from tests.engine.recorder import Recorder
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.engine.steps import WatchedStep


def run(pipe: Any, **options: Any):
    return pipe(
        "a red circle",
        height=64,
        width=64,
        num_inference_steps=5,
        generator=torch.Generator().manual_seed(7),
        output_type="np",
        **options,
    ).images


def watched(pipe: Any, calls: list[Any]):
    own = copy.copy(pipe)
    own.__dict__["scheduler"] = copy.deepcopy(pipe.scheduler)

    def note(result: Any, _: Any):
        calls.append(result)
        return result

    own.scheduler.step = WatchedStep(own.scheduler, note)
    return own


def test_the_signature_of_a_watched_step_is_the_scheduler_s(pipe: Any):
    names = set(inspect.signature(watched(pipe, []).scheduler.step).parameters)
    assert {"generator", "eta"} <= names


def test_noise_and_eta_reach_a_watched_ddim(pipe: Any):
    calls: list[Any] = []
    assert np.array_equal(run(watched(pipe, calls), eta=1.0), run(pipe, eta=1.0))
    assert not np.array_equal(run(pipe, eta=1.0), run(pipe, eta=0.0))
    assert len(calls) == 5


def test_the_generator_reaches_a_watched_ancestral_scheduler(pipe: Any):
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    assert np.array_equal(run(watched(pipe, [])), run(pipe))


def test_a_scheduler_that_draws_gets_a_generator_for_each_sample(tmp_path: Path):
    """Pipelines of flow models pass none, and noise from the process's own would never repeat."""
    pipe = load_pipeline(plan(save_family("flux", tmp_path)))
    own = FlowMatchEulerDiscreteScheduler.from_config(
        pipe.scheduler.config, stochastic_sampling=True
    )
    pipe.scheduler = own
    engine = Engine(pipe, inspect_abilities(pipe, {}), max_num_seqs=2)
    asked = [
        Parameters(prompt="a star", seed=seed, width=48, height=32, num_inference_steps=3)
        for seed in (3, 4)
    ]
    first, second = (engine.generate(each, Recorder()) for each in asked)
    both = engine.generate(asked[0].with_changes({"num_outputs_per_prompt": 2}), Recorder())
    assert engine.generate(asked[0], Recorder()).images[0].tobytes() == first.images[0].tobytes()
    assert max(map(difference, both.images, (first.images[0], second.images[0]))) <= 1
    own.register_to_config(stochastic_sampling=False)
    assert difference(engine.generate(asked[0], Recorder()).images[0], first.images[0]) > 1


def difference(one: Image, other: Image) -> int:
    return int(np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).max())
