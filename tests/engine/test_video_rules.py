"""Frames that a video model can make, where its denoiser learnt a place for each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AnimateDiffPipeline, DDIMScheduler, MotionAdapter

from configs.errors import ModelLoadFailed
from configs.parameters import TEXT_TO_VIDEO
from scripts.lab.families import save_family
from scripts.lab.family_trial import Watcher, small_request
from scripts.lab.image_families import stable_diffusion
from scripts.lab.video_families import wan
from tests.engine.conftest import plan
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline

LEARNT = 8


@pytest.fixture
def animated(tmp_path: Path) -> Any:
    """AnimateDiff, whose motion layers know eight places."""
    parts = stable_diffusion().components
    config = parts["unet"].config
    torch.manual_seed(0)
    adapter = MotionAdapter(
        block_out_channels=tuple(config.block_out_channels),
        motion_layers_per_block=config.layers_per_block,
        motion_norm_num_groups=config.norm_num_groups,
        motion_num_attention_heads=2,
        motion_max_seq_length=LEARNT,
    )
    pipe = AnimateDiffPipeline(
        **{name: parts[name] for name in ("vae", "text_encoder", "tokenizer", "unet")},
        motion_adapter=adapter,
        scheduler=DDIMScheduler(beta_schedule="linear", clip_sample=False),
    )
    pipe.save_pretrained(tmp_path)
    return load_pipeline(plan(tmp_path))


def test_no_more_frames_are_made_than_there_are_places(animated: Any):
    abilities = inspect_abilities(animated, {})
    assert (abilities.max_frames, abilities.default_frames, abilities.frames_step) == (8, 8, 1)
    engine = Engine(animated, abilities)
    for frames in (1, 3, LEARNT):
        made = engine.generate(
            small_request(abilities, TEXT_TO_VIDEO, num_frames=frames), Watcher()
        )
        assert [each.num_frames for each in made.videos] == [frames]
        assert made.warnings == ()


@pytest.mark.parametrize(
    ("frames", "says"),
    [(17, "17 is not 1 and a multiple of 15 more"), (31, "31 is more than the 16 frames")],
)
def test_a_stage_whose_default_is_more_is_refused(tmp_path: Path, frames: int, says: str):
    pipe = load_pipeline(plan(save_family("latte", tmp_path)))
    assert inspect_abilities(pipe, {"num_frames": 1}).default_frames == 1
    with pytest.raises(ModelLoadFailed) as caught:
        inspect_abilities(pipe, {"num_frames": frames})
    assert caught.value.message.startswith(f"default_sampling_params.num_frames: {says}")


def test_a_second_denoiser_has_a_weight_of_its_own():
    pipe = wan()
    abilities = inspect_abilities(pipe, {})
    assert abilities.guidance_scale_2
    engine = Engine(pipe, abilities)
    made = [
        engine.generate(
            small_request(abilities, TEXT_TO_VIDEO, guidance_scale_2=weight), Watcher()
        ).videos[0]
        for weight in (None, 3.0, 9.0)
    ]
    as_first, same, other = (bytes(each.frames.tobytes()) for each in made)
    assert as_first == same != other
    # Wan 2.1 has the argument, one denoiser, and refuses it.
    pipe.register_to_config(boundary_ratio=None)
    assert not inspect_abilities(pipe, {}).guidance_scale_2
