"""Pipelines that copy their noise scheduler and step the copies: each copy goes its own way."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Transformer3DModel,
)

from configs.parameters import TEXT_TO_VIDEO
from scripts.lab.family_trial import Watcher, pixels, small_request
from scripts.lab.video_families import wan
from tests.engine.conftest import count_decodes, plan
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted
from workers.engine.steps import WatchedStep

STEPS = 3


def frame_by_frame() -> Any:
    """SkyReels-V2, which steps a copy of the scheduler for each frame, and the scheduler never."""
    torch.manual_seed(0)
    parts = wan().components
    return SkyReelsV2DiffusionForcingPipeline(
        **{name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")},
        transformer=SkyReelsV2Transformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            num_layers=1,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
            inject_sample_info=True,
        ),
    )


@pytest.fixture
def skyreels(tmp_path: Path) -> Any:
    frame_by_frame().save_pretrained(tmp_path)
    return load_pipeline(plan(tmp_path))


def test_a_pipeline_that_steps_copies_makes_what_it_makes_unwatched(skyreels: Any):
    expected = skyreels(
        "a red circle",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        generator=[torch.Generator().manual_seed(3)],
        fps=16,
    ).frames
    engine = Engine(skyreels, inspect_abilities(skyreels, {}))
    asked = small_request(engine.abilities, TEXT_TO_VIDEO, fps=16.0)
    watcher = Watcher()
    made = engine.generate(asked, watcher)
    assert np.abs(pixels(made) - (expected[0] * 255).round().astype(int)).max() == 0
    assert list(dict.fromkeys(watcher.calls)) == [(step, STEPS) for step in range(STEPS + 1)]
    assert np.array_equal(pixels(engine.generate(asked, Watcher())), pixels(made))


@pytest.mark.parametrize("call", [1, 2, 3, -1])
def test_a_pipeline_that_steps_copies_is_stopped_at_any_step(skyreels: Any, call: int):
    engine = Engine(skyreels, inspect_abilities(skyreels, {}))
    asked = small_request(engine.abilities, TEXT_TO_VIDEO)
    whole = Watcher()
    engine.generate(asked, whole)
    decodes = count_decodes(skyreels)
    with pytest.raises(Interrupted):
        engine.generate(asked, Watcher(stop_at=range(len(whole.calls))[call]))
    assert decodes == []
    assert engine.requests_waiting == 0


def test_steps_of_a_copy_beside_the_scheduler_are_no_steps_of_the_run():
    """As LTX-2 goes, whose sound has a scheduler of its own."""
    told: list[str] = []

    def after(result: Any, _: Any) -> Any:
        told.append("step")
        return result

    scheduler = FlowMatchEulerDiscreteScheduler()
    beside: Any = lambda: told.append("beside")  # noqa: E731
    watched: Any = scheduler
    watched.step = WatchedStep(scheduler, after, beside=beside)
    scheduler.set_timesteps(3)
    sound = copy.deepcopy(scheduler)
    picture_sample = sound_sample = torch.ones(1, 4)
    for time in scheduler.timesteps:
        picture_sample = scheduler.step(torch.ones(1, 4), time, picture_sample)[0]
        sound_sample = sound.step(torch.ones(1, 4), time, sound_sample)[0]
    assert told == ["step", "beside"] * 3
    assert (scheduler.step_index, sound.step_index) == (3, 3)
    assert torch.equal(picture_sample, sound_sample)
    assert copy.deepcopy(scheduler.__dict__)["step"] is scheduler.step
