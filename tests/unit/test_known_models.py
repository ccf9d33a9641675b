"""The data file of known models, and how a model is found in it."""

from collections import Counter

import pytest

from configs.known_models import (
    LOADING_FIGURES,
    SAMPLING_FIGURES,
    KnownModel,
    SavedAs,
    find_known_model,
    known_models,
)
from configs.settings import REPOSITORY
from configs.stage_schema import SamplingParamsSchema
from scripts.lab.settings_table import settings_section

PAGE = REPOSITORY / "docs" / "models.md"

MODELS = known_models()
NOTHING = SavedAs("SomePipeline")


def by_title(title: str) -> KnownModel:
    return next(model for model in MODELS if model.title == title)


def test_there_are_enough_of_them_and_none_twice():
    assert sum(bool(model.ids) for model in MODELS) >= 40
    assert {model.year for model in MODELS} == set(range(2022, 2027))
    ids = Counter(each.lower() for model in MODELS for each in model.ids)
    assert ids.most_common(1)[0][1] == 1
    assert len({model.title for model in MODELS}) == len(MODELS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.title)
def test_each_figure_is_known_and_has_a_source(model: KnownModel):
    assert {figure.name for figure in model.figures} <= {*SAMPLING_FIGURES, *LOADING_FIGURES}
    assert all(figure.source.startswith("https://") for figure in model.figures)
    # A stage file could say them, too.
    values = {name: figure.value for name, figure in model.sampling.items()}
    assert SamplingParamsSchema().load(values) == values
    assert ("width" in values) == ("height" in values)
    assert all(values.get(name, 8) % 8 == 0 for name in ("width", "height"))
    assert set(model.figure("dtype") or {}) <= {*model.parameters} or not model.parameters


def test_what_is_saved_tells_models_apart():
    told = [model.saved for model in MODELS if model.saved]
    assert len({str(each) for each in told}) == len(told)


def test_where_the_negative_prompt_makes_the_guidance_there_is_one():
    guided = [model for model in MODELS if (model.figure("true_cfg_scale") or 0) > 1]
    assert guided
    assert all(model.figure("negative_prompt") == " " for model in guided)


@pytest.mark.parametrize(
    ("title", "gigabytes"),
    [("SDXL", 6.9), ("FLUX.1 dev", 33.7), ("Qwen-Image", 57.7), ("Wan 2.2 TI2V 5B", 24.2)],
)
def test_weights_are_counted_in_their_own_types(title: str, gigabytes: float):
    assert by_title(title).weights_gb == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "Tongyi-MAI/Z-Image-Turbo",
        "tongyi-mai/z-image-turbo",
        "/models/Z-Image-Turbo",
        "/cache/hub/models--Tongyi-MAI--Z-Image-Turbo/snapshots/0123abcd",
    ],
)
def test_a_model_is_found_by_its_name(name: str):
    found = find_known_model([name], SavedAs("ZImagePipeline"))
    assert found is not None
    assert found[0] is by_title("Z-Image-Turbo")


def test_the_name_of_a_folder_is_no_proof():
    assert find_known_model(["/models/Z-Image-Turbo"], NOTHING) is None
    assert find_known_model(["/models/mine"], NOTHING) is None


@pytest.mark.parametrize(
    ("saved", "title"),
    [
        (
            SavedAs("Flux2KleinPipeline", {"is_distilled": True}, {"num_layers": 5}),
            "FLUX.2 klein 4B",
        ),
        (
            SavedAs(
                "Flux2KleinPipeline",
                {"is_distilled": True},
                {"num_layers": 8, "num_single_layers": 24},
            ),
            "FLUX.2 klein 9B",
        ),
        (SavedAs("Flux2KleinPipeline", {"is_distilled": False}), "FLUX.2 klein base"),
        (
            SavedAs(
                "FluxPipeline",
                denoiser={"guidance_embeds": False, "num_layers": 19, "num_single_layers": 38},
            ),
            "FLUX.1 schnell",
        ),
        (
            SavedAs(
                "StableDiffusionXLPipeline",
                denoiser={"sample_size": 64},
                scheduler={
                    "_class_name": "EulerAncestralDiscreteScheduler",
                    "timestep_spacing": "trailing",
                },
            ),
            "SDXL-Turbo",
        ),
        (
            SavedAs(
                "StableDiffusionXLPipeline",
                denoiser={"time_cond_proj_dim": 256},
                scheduler={"_class_name": "LCMScheduler"},
            ),
            "SDXL with a latent consistency U-Net",
        ),
        (
            SavedAs(
                "StableDiffusionXLPipeline",
                denoiser={"time_cond_proj_dim": None},
                scheduler={"_class_name": "LCMScheduler"},
            ),
            "SDXL with a fused LCM LoRA",
        ),
        (
            SavedAs(
                "WanPipeline",
                {"expand_timesteps": True},
                {"num_layers": 30, "num_attention_heads": 24},
            ),
            "Wan 2.2 TI2V 5B",
        ),
        (
            SavedAs(
                "WanPipeline",
                {"boundary_ratio": 0.875},
                {"num_layers": 40, "num_attention_heads": 40},
            ),
            "Wan 2.2 T2V A14B",
        ),
        (
            SavedAs("WanPipeline", denoiser={"num_layers": 40, "num_attention_heads": 40}),
            "Wan 2.1 T2V 14B",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_is_found_by_what_is_saved_with_it(saved: SavedAs, title: str):
    found = find_known_model(["/models/mine"], saved)
    assert found is not None
    assert found[0] is by_title(title)


def test_the_page_of_models_agrees_with_the_data():
    assert settings_section() in PAGE.read_text(encoding="utf-8")


def test_a_model_like_no_other_is_not_known():
    assert find_known_model([], SavedAs("WanPipeline", denoiser={"num_layers": 2})) is None
    assert find_known_model([], SavedAs("StableDiffusionPipeline")) is None
