"""The type of each part: the stage's, what is known, what the autoencoder needs, what is saved."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from configs.errors import ModelLoadFailed
from configs.parameters import IMAGE_TO_IMAGE, TEXT_TO_IMAGE
from configs.stage_config import EngineArgs
from scripts.lab.family_trial import Watcher, pixels, small_inputs, small_request
from tests.engine.conftest import BUNDLED, plan
from tests.engine.tiny_families import save_family
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline
from workers.engine.loading.dtypes import RULE, STAGE, Dtypes, choose_dtypes
from workers.engine.loading.saved_parts import read_parts, weight_files
from workers.patches import in_float32

Saved = Mapping[str, tuple[str, torch.dtype]]


def saved(folder: Path, pipeline: str, parts: Saved, **vae: Any) -> Path:
    """A folder as the hub has it, of a pipeline whose parts have one number each."""
    folder.mkdir(parents=True)
    index: dict[str, Any] = {"_class_name": pipeline}
    for name, (kind, dtype) in parts.items():
        index[name] = ["transformers" if "encoder" in name else "diffusers", kind]
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(vae if name == "vae" else {}))
        save_file({"a": torch.ones(1, dtype=dtype)}, folder / name / "model.safetensors")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
WAN: Saved = {
    "text_encoder": ("UMT5EncoderModel", BRAIN),
    "transformer": ("WanTransformer3DModel", FULL),
    "vae": ("AutoencoderKLWan", FULL),
}
SDXL: Saved = {
    "text_encoder": ("CLIPTextModel", HALF),
    "unet": ("UNet2DConditionModel", HALF),
    "vae": ("AutoencoderKL", HALF),
}
FLUX: Saved = {
    "text_encoder": ("CLIPTextModel", BRAIN),
    "transformer": ("FluxTransformer2DModel", BRAIN),
    "vae": ("AutoencoderKL", BRAIN),
}
SANA: Saved = {
    "text_encoder": ("Gemma2Model", BRAIN),
    "transformer": ("SanaTransformer2DModel", HALF),
    "vae": ("AutoencoderDC", FULL),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """One device of that compute capability, which is all that is asked of it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: request.param)


def choice(folder: Path, dtype: Any = "auto", device: str = "cuda") -> Dtypes:
    return choose_dtypes(EngineArgs(str(folder), dtype=dtype), read_parts(folder), device)


def chosen(folder: Path, dtype: Any = "auto", device: str = "cuda") -> dict[str, str]:
    return dict(choice(folder, dtype, device).types)


@pytest.mark.parametrize("gpu", [(9, 0), (7, 5)], indirect=True)
@pytest.mark.parametrize(
    ("pipeline", "parts", "vae", "modern", "old"),
    [
        ("WanPipeline", WAN, {}, ("bfloat16", "float32"), ("float16", "float32")),
        (
            "StableDiffusionXLPipeline",
            SDXL,
            {"force_upcast": True},
            ("float16", "float32"),
            ("float16", "float32"),
        ),
        (
            "StableDiffusionXLPipeline",
            SDXL,
            {"force_upcast": False},
            ("float16", "float16"),
            ("float16", "float16"),
        ),
        # Its configuration says so too, but its pipeline decodes as it is.
        ("FluxPipeline", FLUX, {"force_upcast": True}, ("bfloat16",) * 2, ("float16",) * 2),
    ],
)
def test_what_a_gpu_gets(
    pipeline: str,
    parts: Saved,
    vae: dict[str, Any],
    modern: tuple[str, str],
    old: tuple[str, str],
    gpu: None,
    tmp_path: Path,
):
    folder = saved(tmp_path / "mine", pipeline, parts, **vae)
    usual, decoder = modern if torch.cuda.get_device_capability() >= (8, 0) else old
    types = chosen(folder)
    assert types["default"] == next(types[part] for part in parts if part in types) == usual
    assert types.get("vae", usual) == decoder
    assert set(chosen(folder, device="cpu").values()) == {"float32"}


@pytest.mark.parametrize("gpu", [(9, 0), (7, 5)], indirect=True)
def test_what_is_known_of_a_part_stands_on_every_gpu(gpu: None, tmp_path: Path):
    folder = saved(tmp_path / "Sana_1600M_1024px_diffusers", "SanaPipeline", SANA)
    found = choice(folder)
    assert found.types == {
        "default": "float16",
        "transformer": "float16",
        "text_encoder": "bfloat16",
        "vae": "bfloat16",
    }
    assert found.sources["vae"] == found.sources["text_encoder"] != RULE
    assert found.sources["vae"].startswith("https://")
    assert found.sources["default"] == RULE


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_the_stage_comes_first(gpu: None, tmp_path: Path):
    folder = saved(tmp_path / "wan", "WanPipeline", WAN)
    assert set(chosen(folder, "float16").values()) == {"float16"}
    named = choice(folder, {"vae": "bfloat16"})
    assert (named.types["vae"], named.types["default"]) == ("bfloat16", "bfloat16")
    assert (named.sources["vae"], named.sources["default"]) == (STAGE, RULE)
    assert chosen(folder, {"default": "bfloat16"}) == {"default": "bfloat16"}
    mixed = chosen(folder, {"default": "float16", "vae": "auto"})
    assert (mixed["default"], mixed["vae"]) == ("float16", "float32")
    # What the others get follows the denoiser, to whose type they hand what they make.
    for word in ("float16", "float32"):
        assert chosen(folder, {"transformer": word})["default"] == word
    with pytest.raises(ModelLoadFailed, match=r"dtype\.vea: the model has no such part; use defau"):
        chosen(folder, {"vea": "float32"})


def test_files_are_chosen_as_diffusers_does(tmp_path: Path):
    def files(*names: str, variant: str | None = None) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        return [file.name for file in weight_files(folder, variant)]

    both = ("model.safetensors", "model.fp16.safetensors", "pytorch_model.bin")
    assert files(*both) == ["model.safetensors"]
    assert files(*both, variant="fp16") == ["model.fp16.safetensors"]
    assert files(*both, variant="ema") == ["model.safetensors"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert files(*shards, "model.safetensors.index.json", "model.safetensors") == shards
    assert files("pytorch_model.bin", "config.json") == ["pytorch_model.bin"]
    assert files("config.json") == []


def test_the_bundled_model_is_read_without_its_weights():
    parts = read_parts(BUNDLED)
    assert parts.keys() == {"unet", "vae", "text_encoder"}
    assert {part.main_type for part in parts.values()} == {"F16"}
    pipe = Engine.load(plan()).pipe
    for name, part in parts.items():
        assert part.numbers["F16"] == sum(each.numel() for each in getattr(pipe, name).parameters())


def test_an_autoencoder_of_another_half_precision_can_rise_with_the_rest(tmp_path: Path):
    folder = save_family("sana", tmp_path)
    pipe = load_pipeline(plan(folder, dtype={"default": "float16", "vae": "bfloat16"}))
    latents = torch.zeros(1, pipe.vae.config.latent_channels, 1, 1, dtype=torch.float16)
    with torch.inference_mode():
        assert pipe.vae.decode(latents).sample.dtype == torch.bfloat16
        with in_float32([pipe.vae]):
            assert pipe.vae.decode(latents.float()).sample.dtype == torch.float32
        picture = torch.zeros(1, 3, 64, 64, dtype=torch.float16)
        assert pipe.vae.encode(picture).latent.dtype == torch.float16
    assert pipe.vae.to(torch.float32).dtype == torch.bfloat16


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_an_autoencoder_stays_in_float32_beside_a_denoiser_that_is_not(half: str, tmp_path: Path):
    folder = save_family("stable_diffusion_xl", tmp_path)
    engine = Engine.load(plan(folder, dtype={"default": half, "vae": "float32"}))
    assert engine.abilities.dtypes["vae"] == "float32"
    assert engine.abilities.dtypes["unet"] == engine.abilities.dtypes["text_encoder_2"] == half
    whole = Engine.load(plan(folder))
    weights = [weight.clone() for weight in engine.pipe.vae.parameters()]
    # Image to image brings it to the type of the text and back, which would round its weights.
    for task in (IMAGE_TO_IMAGE, TEXT_TO_IMAGE):
        asked, inputs = small_request(engine.abilities, task), small_inputs(task)
        made = pixels(engine.generate(asked, Watcher(), inputs))
        assert abs(made - pixels(whole.generate(asked, Watcher(), inputs))).mean() < 1
    assert all(map(torch.equal, weights, engine.pipe.vae.parameters()))
