"""What is known of a model lies under what its stage says, and over what its pipeline says."""

import inspect
import json
import logging
from pathlib import Path
from typing import Any, get_args

import diffusers
import numpy as np
import pytest
import torch

from configs.known_models import known_models
from configs.parameters import TEXT_TO_IMAGE
from scripts.lab.families import save_family
from scripts.lab.family_trial import Watcher, pixels, small_request
from tests.engine.conftest import BUNDLED, plan
from workers.engine.abilities import inspect_abilities
from workers.engine.arguments import arguments_of, default_negative_prompt
from workers.engine.engine import Engine
from workers.engine.known_settings import find_defaults
from workers.engine.loader import load_pipeline

TURBO = next(model for model in known_models() if model.title == "Z-Image-Turbo")


@pytest.fixture(scope="module")
def z_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("z_image", tmp_path_factory.mktemp("z_image"))


@pytest.fixture
def turbo(z_image: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "Z-Image-Turbo"
    folder.symlink_to(z_image)
    return folder


def served(folder: Path, **staged: Any) -> Engine:
    return Engine.load(plan(folder, staged))


def test_a_known_model_is_served_with_its_settings(turbo: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        abilities = served(turbo).abilities
    assert abilities.default_steps == TURBO.figure("num_inference_steps") == 9
    assert abilities.default_guidance_scale == 0
    assert (abilities.default_width, abilities.default_height) == (1024, 1024)
    assert abilities.known_as == "Z-Image-Turbo"
    assert set(abilities.default_sources) == set(TURBO.sampling)
    shift = abilities.scheduler_settings["shift"]
    assert shift["value"] == TURBO.figure("shift") == 3.0
    assert shift["source"].startswith("https://")
    lines = [record.getMessage() for record in caplog.records if "settings of" in record.message]
    assert len(lines) == 1
    for said in ("Z-Image-Turbo", "num_inference_steps 9", "guidance_scale 0", "https://"):
        assert said in lines[0]


def test_the_stage_comes_first(turbo: Path):
    abilities = served(turbo, num_inference_steps=4, width=64, height=32).abilities
    assert (abilities.default_steps, abilities.default_guidance_scale) == (4, 0)
    assert (abilities.default_width, abilities.default_height) == (64, 32)
    assert set(abilities.default_sources) == {"guidance_scale"}


def test_one_side_of_a_size_is_not_joined_with_the_other_of_another(turbo: Path):
    abilities = served(turbo, width=512).abilities
    assert not {"width", "height"} & set(abilities.default_sources)


def test_a_folder_says_what_it_was_saved_from(z_image: Path, tmp_path: Path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for part in z_image.iterdir():
        (folder / part.name).symlink_to(part)
    index = json.loads((z_image / "model_index.json").read_text())
    (folder / "model_index.json").unlink()
    (folder / "model_index.json").write_text(
        json.dumps({**index, "_name_or_path": "Tongyi-MAI/Z-Image-Turbo"})
    )
    assert served(folder).abilities.known_as == "Z-Image-Turbo"


def test_another_model_is_not_known(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        abilities = served(BUNDLED).abilities
    assert abilities.known_as is None
    assert not abilities.default_sources
    assert "no settings are known for" in caplog.text


def test_its_scheduler_tells_a_fast_model():
    pipe = load_pipeline(plan(BUNDLED))
    pipe.scheduler = diffusers.LCMScheduler.from_config(pipe.scheduler.config)
    defaults = find_defaults(pipe, str(BUNDLED), {})
    assert inspect_abilities(pipe, defaults.values).default_steps == 4
    assert inspect_abilities(pipe, defaults.values).default_guidance_scale == 1


def test_what_does_not_fit_the_pipeline_is_left_out(tmp_path: Path):
    folder = tmp_path / "CogVideoX-2b"
    folder.symlink_to(save_family("latte", tmp_path / "latte"))
    abilities = served(folder).abilities  # 49 frames, and Latte learnt places for its own 16
    assert abilities.default_frames == 16
    assert abilities.default_sources.keys() >= {"num_inference_steps"}
    assert "num_frames" not in abilities.default_sources


def bare(kind: Any, **parts: Any) -> Any:
    """A pipeline without weights: with None for all that it needs and `parts` has not."""
    needed = [
        name
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.default is inspect.Parameter.empty and name != "self"
    ]
    parts.setdefault("scheduler", diffusers.FlowMatchEulerDiscreteScheduler())
    return kind(**{**dict.fromkeys(needed), **parts})


def test_sizes_that_pipelines_keep_to_themselves_are_asked_for():
    mochi = inspect_abilities(bare(diffusers.MochiPipeline), {})
    assert (mochi.default_width, mochi.default_height) == (848, 480)
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    hunyuan = bare(
        diffusers.HunyuanVideo15Pipeline, vae=vae, guider=diffusers.ClassifierFreeGuidance()
    )
    abilities = inspect_abilities(hunyuan, {})
    assert (abilities.default_width, abilities.default_height) == (848, 480)
    assert abilities.default_frames == 121
    assert inspect_abilities(bare(diffusers.LTX2Pipeline), {}).default_frames == 121


def test_a_distilled_model_is_known_by_what_is_saved():
    klein = bare(diffusers.Flux2KleinPipeline, is_distilled=True)
    defaults = find_defaults(klein, "someone/klein-of-mine", {})
    assert defaults.known_as == "FLUX.2 klein 4B"
    assert (defaults.values["num_inference_steps"], defaults.values["guidance_scale"]) == (4, 1)


def test_pipelines_and_entries_of_the_data_are_those_of_diffusers():
    told = [model.saved for model in known_models() if model.saved]
    for saved in told:
        takes = inspect.signature(getattr(diffusers, saved.pipeline).__init__).parameters
        assert set(saved.index) <= set(takes), saved
        kind = (takes.get("transformer") or takes["unet"]).annotation
        entries = {
            name
            for each in get_args(kind) or (kind,)
            for name in inspect.signature(_class_of(each).__init__).parameters
        }
        assert set(saved.denoiser) <= entries, saved
        scheduler = saved.scheduler.get("_class_name", "FlowMatchEulerDiscreteScheduler")
        known = inspect.signature(getattr(diffusers, scheduler).__init__).parameters
        assert set(saved.scheduler) <= {"_class_name", *known}, saved


def _class_of(annotation: Any) -> Any:
    return getattr(diffusers, annotation) if isinstance(annotation, str) else annotation


@pytest.mark.parametrize(
    ("title", "denoiser", "config"),
    [
        ("FLUX.1 dev", "FluxTransformer2DModel", {"guidance_embeds": True}),
        ("Qwen-Image", "QwenImageTransformer2DModel", {}),
        ("Z-Image", "ZImageTransformer2DModel", {}),
        ("HunyuanVideo", "HunyuanVideoTransformer3DModel", {}),
        ("Mochi 1", "MochiTransformer3DModel", {}),
        ("LTX-2", "LTX2VideoTransformer3DModel", {}),
        ("Wan 2.1 T2V 14B", "WanTransformer3DModel", {}),
    ],
)
def test_parameters_are_counted_on_the_published_configurations(
    title: str, denoiser: str, config: dict[str, Any]
):
    known = next(model for model in known_models() if model.title == title)
    with torch.device("meta"):
        made = getattr(diffusers, denoiser)(**config)
    counted = sum(weight.numel() for weight in made.parameters())
    assert counted / 1e9 == pytest.approx(known.parameters["transformer"], rel=0.01)


def test_guidance_by_a_second_prompt_is_real_without_one(tmp_path: Path):
    """Qwen-Image leaves its guidance out where there is no negative prompt."""
    engine = served(save_family("qwen_image", tmp_path / "qwen_image"), width=32, height=32)
    assert engine.abilities.default_true_cfg_scale == 4
    assert engine.abilities.default_negative_prompt == " "
    asked = small_request(engine.abilities, TEXT_TO_IMAGE)
    made = {
        (scale, negative): pixels(
            engine.generate(
                asked.with_changes({"true_cfg_scale": scale, "negative_prompt": negative}),
                Watcher(),
            )
        )
        for scale, negative in ((None, None), (4.0, None), (4.0, " "), (1.0, None))
    }
    assert np.array_equal(made[None, None], made[4.0, " "])
    assert np.array_equal(made[4.0, None], made[4.0, " "])
    assert not np.array_equal(made[1.0, None], made[4.0, " "])


def test_nothing_is_added_where_there_is_no_such_guidance():
    taken = arguments_of(diffusers.FluxPipeline)
    assert default_negative_prompt(taken, None) is None
    assert default_negative_prompt(taken, 1.0) is None
    assert default_negative_prompt(taken, 2.0) == " "
    assert default_negative_prompt(arguments_of(diffusers.StableDiffusionPipeline), None) is None
