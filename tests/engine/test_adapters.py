"""LoRA adapters: what a request asked for, to the byte, and nothing of it in any other."""

import re
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from configs.adapter_fields import LoraSource
from configs.errors import LoraLoadFailed, ModelLoadFailed
from configs.parameters import Lora
from configs.stage_config import PipelineSettings
from tests.engine.conftest import MakeParameters, plan
from tests.engine.lora_files import lora_weights, save_lora, save_peft
from tests.engine.recorder import Recorder
from tests.engine.tiny_families import save_family
from workers.engine.engine import Engine
from workers.engine.features.adapters import Adapters
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted

STYLE, BOTH, WORDS = Lora("style"), Lora("both", 0.5), Lora("words")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of the denoiser, of the text encoder, of both, and three that are none."""
    pipe = load_pipeline(plan())
    folder = tmp_path_factory.mktemp("loras")
    unet, text = {"unet": pipe.unet}, {"text_encoder": pipe.text_encoder}
    save_lora(folder / "style.safetensors", unet, 1)
    save_lora(folder / "both.safetensors", {**unet, **text}, 2)
    save_lora(folder / "words.safetensors", text, 3)
    (folder / "own").mkdir()
    save_lora(folder / "own" / "pytorch_lora_weights.safetensors", unet, 4)
    (folder / "torn.safetensors").write_bytes((folder / "style.safetensors").read_bytes()[:2000])
    wide = {name: torch.cat([w, w], 1) for name, w in lora_weights(unet, 5).items()}
    save_file(wide, folder / "wide.safetensors")
    save_file({"transformer.x.lora_A.weight": torch.ones(2, 2)}, folder / "other.safetensors")
    save_peft(folder / "peft", unet, 1, lora_alpha=4)
    save_peft(folder / "dora", unet, 1, use_dora=True)
    style = lora_weights(unet, 1)
    sides = ("lora_A", "lora_B")
    odd = {f"unet.nowhere.to_q.{side}.weight": torch.ones(2, 2) for side in sides}
    second = {f"text_encoder_2.a.{side}.weight": torch.ones(2, 2) for side in sides}
    save_file({**style, **odd, **second}, folder / "partly.safetensors")
    mostly = {f"text_encoder_2.{name}": weight.clone() for name, weight in style.items()}
    save_file({**dict(list(style.items())[:4]), **mostly}, folder / "mostly.safetensors")
    for name, key in (("loha", "hada_w1_a"), ("scaled", "dora_scale")):
        save_file({**style, f"unet.x.{key}": torch.ones(2, 2)}, folder / f"{name}.safetensors")
    (folder / "notes.txt").write_text("no adapter")
    (folder / "-odd name.safetensors").touch()
    return folder


@pytest.fixture
def parameters(parameters: MakeParameters) -> MakeParameters:
    """In three steps, which show an adapter as well as more."""
    return partial(parameters, num_inference_steps=3)


def adapted(folder: Path, max_num_seqs: int = 1, **settings: Any) -> Engine:
    settings = {"lora_dir": str(folder), **settings}
    return Engine.load(plan(pipeline=PipelineSettings(**settings), max_num_seqs=max_num_seqs))


def adapters(engine: Engine) -> Adapters:
    (found,) = (each for each in engine.features if isinstance(each, Adapters))
    return found


def loaded(engine: Engine) -> tuple[str, ...]:
    return adapters(engine).loaded


@pytest.fixture(scope="module")
def shared(folder: Path) -> Engine:
    return adapted(folder)


def made(engine: Engine, parameters: Any) -> bytes:
    return engine.generate(parameters, Recorder()).images[0].tobytes()


def worst(one: bytes, other: bytes) -> int:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_the_adapters_of_the_folder_are_named(shared: Engine):
    assert shared.abilities.loras == (
        *("both", "dora", "loha", "mostly", "other", "own", "partly", "peft", "scaled", "style"),
        *("torn", "wide", "words"),
    )


def test_a_folder_of_peft_has_the_scale_of_its_configuration(
    shared: Engine, parameters: MakeParameters
):
    """`lora_alpha` 4 of rank 2 is twice what the same matrices are without it."""
    twice = made(shared, parameters(lora=(Lora("style", 2.0),)))
    assert worst(made(shared, parameters(lora=(Lora("peft"),))), twice) <= 1
    assert worst(made(shared, parameters(lora=(STYLE,))), twice) > 8


def test_weights_without_a_place_and_text_parts_are_said(
    shared: Engine, parameters: MakeParameters
):
    asked = parameters(lora=(Lora("partly"),), num_inference_steps=2)
    for _ in range(2):
        text, lost = shared.generate(asked, Recorder()).warnings
        assert text.startswith("lora: 'partly': its part for a text encoder was left out")
        assert re.fullmatch(r"lora: 'partly': \d+% of its weights found no place .*", lost)
    plain = parameters(lora=(STYLE,), num_inference_steps=2)
    assert shared.generate(plain, Recorder()).warnings == ()


def test_a_folder_with_several_files_says_which_was_used(
    folder: Path, tmp_path: Path, parameters: MakeParameters
):
    for name in ("a", "b"):
        shutil.copy(folder / "style.safetensors", tmp_path / f"{name}.safetensors")
    settings = PipelineSettings(lora_modules={"style": LoraSource(str(tmp_path))})
    engine = Engine.load(plan(pipeline=settings))
    made = engine.generate(parameters(lora=(STYLE,), num_inference_steps=1), Recorder())
    assert made.warnings == ("lora: 'style': its folder has 2 files; a.safetensors was used",)


@pytest.mark.parametrize("lora", [(STYLE,), (BOTH,), (WORDS,), (Lora("own"),), (STYLE, WORDS)])
def test_an_adapter_changes_its_request_and_no_later_one(
    shared: Engine, parameters: MakeParameters, lora: tuple[Lora, ...]
):
    before = made(shared, parameters())
    with_it = made(shared, parameters(lora=lora))
    assert worst(with_it, before) > 8
    assert made(shared, parameters()) == before
    assert made(shared, parameters(lora=lora)) == with_it


def test_without_adapters_the_bytes_are_those_of_a_stage_that_has_none(
    shared: Engine, engine: Engine, parameters: MakeParameters
):
    shared.generate(parameters(lora=(BOTH,)), Recorder())
    assert made(shared, parameters()) == made(engine, parameters())


def test_the_scale_is_that_of_the_request(shared: Engine, parameters: MakeParameters):
    half = made(shared, parameters(lora=(Lora("style", 0.5),)))
    whole = made(shared, parameters(lora=(STYLE,)))
    assert worst(half, whole) > 8
    assert made(shared, parameters(lora=(Lora("style", 0.0),))) == made(shared, parameters())
    assert made(shared, parameters(lora=(Lora("style", 0.5),))) == half


def test_loading_one_leaves_the_weights_of_another(folder: Path, parameters: MakeParameters):
    engine = adapted(folder)
    alone = made(engine, parameters(lora=(BOTH,)))
    engine.generate(parameters(lora=(WORDS,)), Recorder())
    assert loaded(engine) == ("both", "words")
    assert made(engine, parameters(lora=(BOTH,))) == alone


def test_requests_of_different_sets_at_a_time_equal_their_solo_runs(
    folder: Path, parameters: MakeParameters
):
    """One adapter, its other scale, several, one in the text encoder alone, and none."""
    sets = ((), (STYLE,), (STYLE,), (Lora("style", 0.3),), (BOTH, STYLE), (WORDS,), (WORDS,), ())
    asked = [
        parameters(lora=lora, seed=seed, num_inference_steps=3 + seed % 3)
        for seed, lora in enumerate(sets)
    ]
    solo = adapted(folder)
    alone = [made(solo, each) for each in asked]
    engine = adapted(folder, max_num_seqs=8)
    results: list[Any] = [None] * len(asked)

    def run(index: int) -> None:
        results[index] = engine.generate(asked[index], Recorder())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [result is None for result in results] == [False] * len(asked)
    for result, reference in zip(results, alone, strict=True):
        assert worst(result.images[0].tobytes(), reference) <= 1
    assert made(engine, asked[3]) == alone[3]


def test_the_one_used_longest_ago_makes_room_and_comes_back(
    folder: Path, parameters: MakeParameters
):
    engine = adapted(folder, max_cpu_loras=2)
    first = made(engine, parameters(lora=(STYLE,)))
    engine.generate(parameters(lora=(BOTH,)), Recorder())
    engine.generate(parameters(lora=(STYLE,)), Recorder())
    engine.generate(parameters(lora=(WORDS,)), Recorder())
    assert loaded(engine) == ("style", "words")
    names = [name for name, _ in engine.pipe.unet.named_parameters() if "lora_A" in name]
    assert {name.split(".")[-2] for name in names} == {"adapter0"}
    engine.generate(parameters(lora=(BOTH,)), Recorder())
    assert loaded(engine) == ("words", "both")
    assert made(engine, parameters(lora=(STYLE,))) == first


def test_a_set_above_the_limit_is_loaded_all_the_same(folder: Path, parameters: MakeParameters):
    engine = adapted(folder, max_cpu_loras=1)
    both = made(engine, parameters(lora=(STYLE, WORDS)))
    engine.generate(parameters(lora=(BOTH,)), Recorder())
    assert loaded(engine) == ("both",)
    assert made(engine, parameters(lora=(STYLE, WORDS))) == both


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torn", "'torn' could not be loaded: SafetensorError: "),
        ("wide", "'wide' could not be loaded: RuntimeError: Error(s) in loading state_dict"),
        ("wide", "torch.Size(["),
        ("dora", "'dora' could not be loaded: it is a DoRA of PEFT, which is not supported"),
        ("scaled", "it is a DoRA of another trainer than diffusers, which is not supported"),
        ("loha", "'loha' could not be loaded: it is a LoHa, which is not supported; use a LoRA"),
        ("mostly", "of its weights found no place in this model; use one of its family"),
        ("other", "'other' could not be loaded: "),
        ("nothing", "there is no adapter 'nothing'; use both, dora, loha"),
        ("../style", "there is no adapter '../style'; use both"),
    ],
)
def test_a_broken_adapter_fails_its_request_alone(
    shared: Engine, parameters: MakeParameters, name: str, says: str
):
    before = made(shared, parameters()), made(shared, parameters(lora=(STYLE,)))
    for _ in range(2):
        with pytest.raises(LoraLoadFailed) as caught:
            shared.generate(parameters(lora=(STYLE, Lora(name))), Recorder())
        assert says in caught.value.message
        assert caught.value.code == "lora_load_failed"
    assert name not in loaded(shared)
    assert made(shared, parameters()) == before[0]
    assert made(shared, parameters(lora=(STYLE,))) == before[1]


def test_an_interrupted_request_leaves_no_adapter_behind(
    shared: Engine, parameters: MakeParameters
):
    before = made(shared, parameters())
    for call in (1, 3):
        with pytest.raises(Interrupted):
            shared.generate(parameters(lora=(BOTH,)), Recorder(stop_at=call))
        assert made(shared, parameters()) == before
    assert adapters(shared).in_use == ()


def test_a_transformer_takes_adapters(tmp_path: Path, parameters: MakeParameters):
    model = save_family("flux", tmp_path / "flux")
    pipe = load_pipeline(plan(model))
    save_lora(tmp_path / "style.safetensors", {"transformer": pipe.transformer}, 1)
    source = LoraSource(str(tmp_path), "style.safetensors")
    settings = PipelineSettings(lora_modules={"style": source})
    engine = Engine.load(plan(model, pipeline=settings))
    before = made(engine, parameters(num_inference_steps=2))
    assert worst(made(engine, parameters(num_inference_steps=2, lora=(STYLE,))), before) > 2
    assert made(engine, parameters(num_inference_steps=2)) == before


def test_weights_come_in_the_type_of_the_part(folder: Path, parameters: MakeParameters):
    settings = PipelineSettings(lora_dir=str(folder))
    engine = Engine.load(plan(dtype="bfloat16", pipeline=settings))
    engine.generate(parameters(lora=(BOTH,), num_inference_steps=2), Recorder())
    for part in (engine.pipe.unet, engine.pipe.text_encoder):
        assert {weight.dtype for weight in part.parameters()} == {torch.bfloat16}
        assert not any(layer.training for layer in part.modules())


def test_layers_are_not_made_in_inference_mode(folder: Path, parameters: MakeParameters):
    """Weights that torchao quantized cannot be in such layers."""
    engine = Engine.load(plan(pipeline=PipelineSettings(lora_dir=str(folder))))
    engine.generate(parameters(lora=(BOTH,), num_inference_steps=2), Recorder())
    for part in (engine.pipe.unet, engine.pipe.text_encoder):
        assert not any(weight.is_inference() for weight in part.parameters())


def test_a_name_that_stands_for_two_is_refused(folder: Path, pipe: Any):
    modules = {"style": LoraSource("org/style")}
    settings = PipelineSettings(lora_dir=str(folder), lora_modules=modules)
    with pytest.raises(ModelLoadFailed, match="'style' names two adapters, org/style and /"):
        Adapters(pipe, settings)


def test_a_family_without_adapters_is_refused(folder: Path):
    with pytest.raises(ModelLoadFailed, match="PixArtAlphaPipeline supports no adapters; leave"):
        Adapters(type("PixArtAlphaPipeline", (), {})(), PipelineSettings(lora_dir=str(folder)))
