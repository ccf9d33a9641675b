"""The watched scheduler: diffusers must not notice that it is watched."""

import copy
import inspect
from typing import Any

import numpy as np
import torch
from diffusers import EulerAncestralDiscreteScheduler

from workers.denoising_run import watch_steps


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

    def note(result: Any):
        calls.append(result)
        return result

    watch_steps(own.scheduler, note)
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
