"""Where a stage finds its model, and the name that clients know it by."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.stages import (
    load_stages,
)
from tests.unit.stage_files import REPOSITORY, changed, load, refusal, stage


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that looks like a diffusers pipeline from outside."""
    folder = tmp_path / "pipelines" / "small"
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "written", ["./pipelines/small", "pipelines/small", "../{up}/pipelines/small/"]
)
def test_a_model_folder_is_found_from_the_current_directory(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (only,) = load(tmp_path, changed("engine_args.model", written.format(up=tmp_path.name)))
    assert only.engine_args.model == str(model_folder)
    assert only.engine_args.model_path == model_folder
    assert only.model_name == "small"


def test_a_model_folder_is_found_from_home_and_by_a_bare_name(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(model_folder.parent)
    for written in ("~/pipelines/small", "small", str(model_folder)):
        (only,) = load(tmp_path, changed("engine_args.model", written))
        assert only.engine_args.model_path == model_folder


def test_behind_a_link_the_name_as_written_is_the_models_name(
    tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "nice-name").symlink_to(model_folder)
    (only,) = load(tmp_path, changed("engine_args.model", str(tmp_path / "nice-name")))
    assert only.model_name == "nice-name"


def test_a_hub_id_is_not_looked_up(tmp_path: Path) -> None:
    (only,) = load(tmp_path, changed("engine_args.model", "no-such.org/No_such-model.v1"))
    assert only.engine_args.model_path is None
    assert only.model_name == "no-such.org/No_such-model.v1"


@pytest.mark.parametrize(
    "page",
    [
        "https://huggingface.co/org/Some-Model.1",
        "https://huggingface.co/org/Some-Model.1/",
        "https://huggingface.co/org/Some-Model.1/tree/main",
        "https://hf.co/org/Some-Model.1/tree/main/transformer?library=diffusers",
        "huggingface.co/org/Some-Model.1#usage",
        "hf://org/Some-Model.1",
        "org/Some-Model.1/blob/main/model_index.json",
    ],
)
def test_the_address_of_a_hub_page_is_the_id(tmp_path: Path, page: str) -> None:
    (only,) = load(tmp_path, changed("engine_args.model", page))
    assert only.engine_args.model_path is None
    assert only.model_name == "org/Some-Model.1"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("https://huggingface.co/org/m/tree/fp16", "write org/m here and fp16 in revision"),
        ("https://huggingface.co/datasets/org/m", "is not the address of a model"),
        ("https://huggingface.co/datasets/m", "is not the page of a model"),
        ("https://example.org/org/m", "is not the address of a model on the hub"),
        ("org/m/blob/main/m-Q4.gguf", "this file in quantization.gguf_file"),
        ("org/m/resolve/main/lora/x_lora.safetensors", "this file in lora_modules"),
        ("org/m/blob/main/m.safetensors", "a single checkpoint, save it as a pipeline"),
    ],
)
def test_what_is_no_model_s_page_is_refused_with_where_it_belongs(
    tmp_path: Path, written: str, says: str
) -> None:
    assert says in str(refusal(tmp_path, changed("engine_args.model", written)))


@pytest.mark.parametrize(
    ("name", "says"), [("a.gguf", "quantization.gguf_file"), ("a.safetensors", "lora_modules")]
)
def test_a_file_of_weights_is_refused_with_where_it_belongs(
    tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / name).touch()
    message = str(refusal(tmp_path, changed("engine_args.model", str(tmp_path / name))))
    assert "is a file" in message
    assert says in message


def test_a_served_model_name_comes_first(tmp_path: Path) -> None:
    (only,) = load(tmp_path, changed("engine_args.served_model_name", "mine"))
    assert only.model_names == ("mine",)
    (only,) = load(tmp_path, changed("engine_args.served_model_name", ["mine", "gpt", "mine"]))
    assert (only.model_name, only.model_names) == ("mine", ("mine", "gpt"))


def test_a_model_given_beside_the_file_replaces_that_of_the_only_stage(
    tmp_path: Path, model_folder: Path
) -> None:
    (only,) = load(tmp_path, changed("engine_args.model", "./is/not/there"), str(model_folder))
    assert only.engine_args.model_path == model_folder
    document = {"stages": [{"stage_id": 0, "stage_type": "diffusion"}]}
    assert load(tmp_path, document, "org/other")[0].model_name == "org/other"
    written = changed("engine_args.model", ["no", "text"])
    assert load(tmp_path, written, "org/other")[0].model_name == "org/other"


def test_a_model_given_beside_a_file_of_several_stages_is_refused(tmp_path: Path) -> None:
    document = {"stages": [stage("org/a", 0), stage("org/b", 1, runtime={"devices": "1"})]}
    message = str(refusal(tmp_path, document, "org/c"))
    assert "the model 'org/c' cannot be given beside" in message
    assert "which has 2 stages" in message
    assert "write it into the file" in message


def test_a_model_given_beside_a_malformed_file_hides_nothing(tmp_path: Path) -> None:
    for document in ({"stages": 3}, {"stages": ["x"]}, {"stages": [stage() | {"engine_args": 3}]}):
        assert "is not a" in str(refusal(tmp_path, document, "org/c"))


def test_a_wrong_model_given_beside_the_file_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, changed("engine_args.dtype", "auto"), "./nope")
    assert error.param == "stages[0].engine_args.model"


def test_another_model_brings_neither_name_nor_defaults_of_the_files_own() -> None:
    own = load_stages(REPOSITORY / "configs" / "tiny_cpu.yaml")[0]
    other = load_stages(REPOSITORY / "configs" / "tiny_cpu.yaml", model="Qwen/Qwen-Image")[0]
    same = load_stages(REPOSITORY / "configs" / "tiny_cpu.yaml", model="./models/tiny")[0]
    assert (other.model_name, dict(other.default_sampling_params)) == ("Qwen/Qwen-Image", {})
    assert other.runtime == own.runtime
    assert same == own
