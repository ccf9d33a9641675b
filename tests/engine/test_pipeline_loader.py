"""Loading: types and devices, and failures that say what to fix."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from sentencepiece import SentencePieceTrainer
from transformers import T5Tokenizer

from configs.errors import ModelLoadFailed
from tests.engine.conftest import BUNDLED, SavedFamily, plan
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.loader import load_pipeline


@pytest.fixture
def copied(tmp_path: Path):
    return shutil.copytree(BUNDLED, tmp_path / "model")


def edit_index(folder: Path, **changes: Any):
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_half_precision_weights_become_float32_on_a_cpu(pipe: Any):
    with safe_open(BUNDLED / "unet" / "diffusion_pytorch_model.safetensors", "pt") as saved:
        assert {saved.get_tensor(name).dtype for name in saved.keys()} == {torch.float16}  # noqa: SIM118
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.float32}


def test_a_type_that_is_asked_for_is_taken():
    assert load_pipeline(plan(dtype="bfloat16")).unet.dtype == torch.bfloat16


def test_the_chunk_s_cores_become_threads():
    threads = torch.get_num_threads()
    load_pipeline(plan())
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is missing")
def test_cuda_without_a_device_says_so():
    with pytest.raises(ModelLoadFailed, match=r"device is cuda, which cannot be used: torch "):
        load_pipeline(plan(device="cuda"))


def truncate(folder: Path):
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def mismatch(folder: Path):
    path = folder / "unet" / "config.json"
    config = json.loads(path.read_text())
    wider = [2 * channels for channels in config["block_out_channels"]]
    path.write_text(json.dumps({**config, "block_out_channels": wider}))


def add_code(folder: Path):
    edit_index(folder, _class_name=["own_pipeline", "OwnPipeline"])
    (folder / "own_pipeline.py").write_text("raise SystemExit('the code of the model ran')\n")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda f: edit_index(f, _class_name="NewPipeline"),
            "may need another version of diffusers",
        ),
        (
            lambda f: edit_index(f, unet=["diffusers", "NewModel"]),
            "may need another version of diffusers",
        ),
        (lambda f: edit_index(f, unet=["elsewhere", "NewModel"]), "only parts from diffusers"),
        (lambda f: edit_index(f, unet=[None, None]), "missing from model_index.json"),
        (add_code, "only pipelines of diffusers itself"),
        (truncate, "it is damaged"),
        (mismatch, "do not belong to the configuration"),
        (lambda f: shutil.rmtree(f / "vae"), "the folder of its part vae is missing; download"),
        (lambda f: (f / "model_index.json").write_text("{"), "it is damaged"),
    ],
)
def test_a_broken_folder_is_named_with_a_fix(copied: Path, spoil: Callable[[Path], Any], says: str):
    spoil(copied)
    with pytest.raises(ModelLoadFailed) as caught:
        load_pipeline(plan(copied))
    assert caught.value.message.startswith(f"{copied}: ")
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_parts_that_no_picture_needs_may_be_missing(copied: Path, caplog: Any):
    checker = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    edit_index(
        copied, safety_checker=checker, feature_extractor=["transformers", "CLIPImageProcessor"]
    )
    pipe = load_pipeline(plan(copied))
    assert (pipe.safety_checker, pipe.feature_extractor) == (None, None)
    for name in ("safety_checker", "feature_extractor"):
        assert f"its folder has no {name}, which is left out" in caplog.text


def test_weights_of_one_variant_alone_are_taken(copied: Path, pipe: Any, caplog: Any):
    saved = copied / "unet" / "diffusion_pytorch_model.safetensors"
    saved.rename(saved.with_suffix(".fp16.safetensors"))
    found = load_pipeline(plan(copied))
    for one, other in zip(found.unet.parameters(), pipe.unet.parameters(), strict=True):
        assert torch.equal(one, other)
    assert "weights of the variant fp16 alone, which is used" in caplog.text


def test_a_third_encoder_that_is_null_is_left_out(saved: SavedFamily, tmp_path: Path):
    folder = shutil.copytree(saved("stable_diffusion_3"), tmp_path / "model")
    nothing = [None, None]
    edit_index(folder, text_encoder_3=nothing, tokenizer_3=nothing)
    for name in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(folder / name)
    pipe = load_pipeline(plan(folder))
    assert (pipe.text_encoder_3, pipe.tokenizer_3) == (None, None)
    assert pipe("a red circle", num_inference_steps=1, height=32, width=32).images


def test_a_missing_variant_says_so():
    with pytest.raises(ModelLoadFailed, match=r"leave engine_args\.variant out"):
        load_pipeline(plan(variant="fp16"))


def test_a_hub_id_without_network_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadFailed, match="check the network, or give the path of a folder"):
        load_pipeline(plan("nobody/nothing-of-that-name"))


def test_default_sizes_that_the_model_cannot_make_are_refused():
    with pytest.raises(ModelLoadFailed, match=r"default_sampling_params\.width: 60 .* 8"):
        Engine.load(plan(defaults={"width": 60}))


@pytest.mark.parametrize(("defaults", "strength"), [({}, 0.8), ({"strength": 0.6}, 0.6)])
def test_the_strength_of_the_stage_comes_before_the_model_s(
    pipe: Any, defaults: dict[str, Any], strength: float
):
    assert inspect_abilities(pipe, defaults).default_strength == strength


def test_a_tokenizer_that_is_a_sentencepiece_file_and_nothing_else_is_read(tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("\n".join(["a red circle on a blue ground and a cat in a hat"] * 50))
    SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "spiece"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    for name in ("text", "spiece.vocab"):
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    assert len(T5Tokenizer.from_pretrained(tmp_path)("a red circle").input_ids) > 3
