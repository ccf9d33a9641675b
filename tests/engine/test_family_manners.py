"""What some families do unlike all others, as `scripts.lab.family_sweep` showed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLAllegro,
    DDPMScheduler,
    IFPipeline,
    StableDiffusionInpaintPipeline,
    UNet2DConditionModel,
)
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import Cosmos3OmniPipelineOutput
from diffusers.pipelines.kandinsky5.pipeline_output import KandinskyImagePipelineOutput
from PIL import Image

from configs.errors import GenerationFailed, ModelLoadFailed
from configs.parameters import IMAGE_TO_IMAGE, IMAGE_TO_VIDEO, INPAINT, TEXT_TO_IMAGE, Parameters
from configs.stage_config import PipelineSettings
from scripts.lab.family_parts import t5, tokenizer
from scripts.lab.family_trial import Watcher, small_inputs, small_request
from scripts.lab.video_families import wan_image_to_video
from tests.engine.conftest import plan
from workers.engine.abilities import inspect_abilities
from workers.engine.arguments import Inputs, arguments_of, call_arguments
from workers.engine.engine import Engine
from workers.engine.generation import frames_in, images_in
from workers.engine.loader import load_pipeline
from workers.engine.loading.settings import apply_settings
from workers.engine.pipelines import own_tasks, task_classes
from workers.engine.warm_up import WarmUpRequests
from workers.families import (
    DENOISER_MANNERS,
    FAMILIES,
    GIVEN_ARGUMENTS,
    Family,
    GivenArgument,
    family_of,
)


def deepfloyd() -> Any:
    """DeepFloyd IF, which denoises pixels and has no autoencoder."""
    torch.manual_seed(0)
    return IFPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        unet=UNet2DConditionModel(
            sample_size=32,
            in_channels=3,
            out_channels=6,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "UpBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            cross_attention_dim=32,
            encoder_hid_dim=32,
            attention_head_dim=8,
            norm_num_groups=8,
        ),
        scheduler=DDPMScheduler(variance_type="learned_range"),
        safety_checker=None,
        feature_extractor=None,
        watermarker=None,
        requires_safety_checker=False,
    )


def test_a_family_without_autoencoder_runs_and_tells_the_steps_that_it_does_not_count(
    tmp_path: Path,
):
    deepfloyd().save_pretrained(tmp_path)
    pipe = load_pipeline(plan(tmp_path))
    engine = Engine(pipe, inspect_abilities(pipe, {}))
    assert engine.abilities.tasks == (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT)
    for task, strength, steps in ((TEXT_TO_IMAGE, None, 4), (IMAGE_TO_IMAGE, 0.5, 2)):
        asked = small_request(
            engine.abilities, task, num_inference_steps=4, strength=strength, width=32, height=32
        )
        watcher = Watcher()
        made = engine.generate(asked, watcher, small_inputs(task))
        assert made.steps == steps
        assert watcher.calls[-steps:] == [(step, steps) for step in range(1, steps + 1)]


def test_a_further_task_that_fails_at_the_warm_up_is_not_offered(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no mask today")

    monkeypatch.setattr(StableDiffusionInpaintPipeline, "prepare_mask_latents", fail)
    engine = Engine(pipe, inspect_abilities(pipe, {}), max_num_seqs=2)
    engine.warm_up()
    assert engine.abilities.tasks == (TEXT_TO_IMAGE, IMAGE_TO_IMAGE)


def test_a_model_whose_own_task_fails_at_the_warm_up_does_not_become_ready(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no latents today")

    monkeypatch.setattr(type(pipe), "prepare_latents", fail)
    engine = Engine(pipe, inspect_abilities(pipe, {}), max_num_seqs=2)
    with pytest.raises(GenerationFailed, match="no latents today"):
        engine.warm_up()


def test_a_pipeline_whose_library_is_missing_says_so(pipe: Any, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise NameError("name 'transforms' is not defined")

    monkeypatch.setattr(type(pipe), "prepare_latents", fail)
    engine = Engine(pipe, inspect_abilities(pipe, {}))
    with pytest.raises(GenerationFailed, match="a library that this pipeline needs is missing"):
        engine.warm_up()


def test_what_makes_no_pictures_is_told_by_its_name():
    with pytest.raises(ValueError, match="KandinskyImagePipelineOutput has no frames"):
        frames_in(KandinskyImagePipelineOutput(image=np.zeros((1, 8, 8, 3))))


def test_outputs_are_found_by_whatever_name_a_family_has_for_them():
    image = np.zeros((1, 8, 8, 3))
    assert images_in(KandinskyImagePipelineOutput(image=image)) is image
    video = np.zeros((5, 8, 8, 3))
    assert frames_in(Cosmos3OmniPipelineOutput(video=video)).shape == (1, 5, 8, 8, 3)


def arguments(name: str, **changes: Any) -> dict[str, Any]:
    usual = {"prompt": "a", "seed": 1, "width": 32, "height": 32, "num_inference_steps": 4}
    return call_arguments(Parameters(**{**usual, **changes}), getattr(diffusers, name))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("StableDiffusionInstructPix2PixPipeline", (256, 160)),  # which has no other size
        ("StableDiffusionImg2ImgPipeline", (256, 160)),
        ("QwenImageEditPipeline", (3000, 2000)),  # which scales it by itself
        ("FluxKontextPipeline", (3000, 2000)),
    ],
)
def test_a_photo_is_scaled_where_the_pipeline_would_make_its_size(name: str, size: tuple[int, int]):
    asked = Parameters("a", 1, 256, 160, 4, task=IMAGE_TO_IMAGE, image=("id/input-0.png",))
    called = call_arguments(
        asked, getattr(diffusers, name), Inputs((Image.new("RGB", (3000, 2000)),))
    )
    assert called["image"].size == size
    said = {key: called[key] for key in ("width", "height") if key in called}
    assert said in ({}, {"width": 256, "height": 160})
    assert called.get("max_area", 256 * 160) == 256 * 160


def test_families_are_called_as_they_can_be():
    assert arguments("EasyAnimatePipeline")["negative_prompt"] == ""
    assert arguments("EasyAnimatePipeline", negative_prompt="x")["negative_prompt"] == "x"
    assert arguments("SanaSprintPipeline")["intermediate_timesteps"] is None
    assert "intermediate_timesteps" not in arguments("SanaSprintPipeline", num_inference_steps=2)
    assert arguments("SanaVideoPipeline", num_frames=9)["frames"] == 9
    assert isinstance(arguments("HeliosPipeline")["generator"], torch.Generator)


def test_a_video_beside_the_image_is_not_needed():
    assert own_tasks(diffusers.LTXConditionPipeline)
    assert not own_tasks(diffusers.CogVideoXVideoToVideoPipeline)


def test_wan_for_a_first_and_a_last_image_is_refused():
    pipe = wan_image_to_video()
    assert list(task_classes(pipe)) == [IMAGE_TO_VIDEO]
    pipe.transformer.register_to_config(pos_embed_seq_len=514)
    with pytest.raises(ModelLoadFailed, match="needs more than a prompt, an image and a mask"):
        task_classes(pipe)


def test_an_autoencoder_that_works_in_tiles_only_has_them():
    vae = AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("AllegroDownBlock3D",) * 4,
        up_block_types=("AllegroUpBlock3D",) * 4,
        norm_num_groups=2,
        layers_per_block=1,
    )

    class AllegroPipeline(SimpleNamespace):
        pass

    apply_settings(AllegroPipeline(components={"vae": vae}), PipelineSettings())
    assert vae.use_tiling


def pipeline_names() -> list[str]:
    # Not by `dir`, which leaves out what is imported when it is first asked for.
    return [name for name in diffusers.__all__ if name.endswith("Pipeline")]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.start)
def test_each_family_of_the_table_is_one_of_diffusers(family: Family):
    assert any(name.startswith(family.start) for name in pipeline_names())
    if family.image_to_video is not None:
        assert own_tasks(getattr(diffusers, family.image_to_video)) == (IMAGE_TO_VIDEO,)


@pytest.mark.parametrize("name", DENOISER_MANNERS)
def test_each_denoiser_of_the_table_is_one_of_diffusers(name: str):
    assert issubclass(getattr(diffusers, name), torch.nn.Module)


@pytest.mark.parametrize("given", GIVEN_ARGUMENTS, ids=lambda given: given.name)
def test_each_argument_of_the_table_is_one_of_a_family_that_is_served(given: GivenArgument):
    served = [
        diffusers.FluxKontextPipeline,
        diffusers.PixArtSigmaPipeline,
        diffusers.SanaSprintPipeline,
    ]
    assert any(given.name in arguments_of(each) for each in served)


def test_the_most_particular_entry_of_the_table_counts():
    assert family_of(diffusers.HunyuanVideo15Pipeline).fps == 24.0
    assert family_of(diffusers.HunyuanVideoPipeline).fps == 15.0
    assert family_of(diffusers.Flux2KleinPipeline).max_images == 4
    assert family_of(diffusers.Flux2KleinKVPipeline).max_images == 1
    assert family_of(diffusers.PixArtAlphaPipeline) == Family("")


def test_weights_of_one_class_that_differ_are_told_by_their_configuration():
    class WanPipeline(SimpleNamespace):
        pass

    both = family_of(WanPipeline(config={"expand_timesteps": True}))
    usual = family_of(WanPipeline(config={"expand_timesteps": False}))
    assert (both.fps, both.image_to_video) == (24.0, "WanImageToVideoPipeline")
    assert (usual.fps, usual.image_to_video) == (16.0, None)
    assert both.one_image_for_all
    assert usual.one_image_for_all


def test_the_warm_up_from_an_image_makes_all_its_steps(pipe: Any):
    image_first = inspect_abilities(diffusers.StableDiffusionImg2ImgPipeline(**pipe.components), {})
    for parameters, _ in WarmUpRequests(image_first, ()).of_each_size():
        assert (parameters.task, parameters.strength) == (IMAGE_TO_IMAGE, 1.0)
