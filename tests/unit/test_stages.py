"""Stages that are right: what a file becomes, and how its replicas are named and dealt devices."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigurationError
from configs.stages import (
    EngineArgs,
    ParallelConfig,
    RuntimeConfig,
    StageConfig,
    find_replica,
    load_stages,
    plan_replicas,
)
from tests.unit.stage_files import REPOSITORY, changed, load, refusal, stage

CONFIGS = REPOSITORY / "configs"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that looks like a diffusers pipeline from outside."""
    folder = tmp_path / "pipelines" / "small"
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    return folder


def test_the_references_example_of_four_single_device_replicas_loads_unchanged() -> None:
    (only,) = load_stages(CONFIGS / "qwen_image_4x1.yaml")
    assert only == StageConfig(
        stage_id=0,
        runtime=RuntimeConfig(devices=(0, 1, 2, 3), num_replicas=4),
        engine_args=EngineArgs(
            model="Qwen/Qwen-Image", parallel_config=ParallelConfig(world_size=1)
        ),
    )
    assert only.model_name == "Qwen/Qwen-Image"
    assert [(plan.name, plan.devices) for plan in plan_replicas([only])] == [
        ("replica0", (0,)),
        ("replica1", (1,)),
        ("replica2", (2,)),
        ("replica3", (3,)),
    ]


def test_the_references_example_of_four_two_device_replicas_loads_unchanged() -> None:
    stages = load_stages(CONFIGS / "wan22_t2v_4x2.yaml")
    assert stages[0].model_name == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert stages[0].devices_per_replica == 2
    assert [(plan.name, plan.devices) for plan in plan_replicas(stages)] == [
        ("replica0", (0, 1)),
        ("replica1", (2, 3)),
        ("replica2", (4, 5)),
        ("replica3", (6, 7)),
    ]


def test_the_bundled_stage_loads_from_the_repository_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (only,) = load_stages("configs/tiny_cpu.yaml")
    assert only.model_name == "tiny"
    assert only.engine_args.model_path == REPOSITORY / "models" / "tiny"
    assert only.engine_args.device == "cpu"
    assert only.engine_args.max_num_seqs == 1
    assert only.chunks == ((0,), (1,))
    assert only.default_sampling_params == {
        "num_inference_steps": 20,
        "guidance_scale": 2.0,
        "width": 64,
        "height": 64,
    }


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    (only,) = load(
        tmp_path, "stages: [{stage_id: 0, stage_type: diffusion, engine_args: {model: a/b}}]"
    )
    assert only == StageConfig(
        stage_id=0, runtime=RuntimeConfig(devices=(0,)), engine_args=EngineArgs(model="a/b")
    )


def test_a_null_counts_as_left_out(tmp_path: Path) -> None:
    nulls = {"devices": None, "num_replicas": None, "env": None}
    document = {"stages": [stage(runtime=nulls, engine_args={"dtype": None, "revision": None})]}
    assert load(tmp_path, document) == load(tmp_path, {"stages": [stage()]})


def test_devices_left_out_are_the_first_ones(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "runtime": {"num_replicas": 3},
        "engine_args": {"parallel_config": {"world_size": 2}},
    }
    (only,) = load(tmp_path, {"stages": [stage(**sections)]})
    assert only.runtime.devices == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("0,1", (0, 1)),
        (" 3 , 1 ", (3, 1)),
        ([1, 0], (1, 0)),
        (["1", "0"], (1, 0)),
        ("01,2", (1, 2)),
    ],
)
def test_devices_may_be_text_or_a_list(
    tmp_path: Path, written: object, devices: tuple[int, ...]
) -> None:
    (only,) = load(tmp_path, changed("runtime.devices", written))
    assert only.runtime.devices == devices


def test_a_single_device_may_be_a_number(tmp_path: Path) -> None:
    (only,) = load(tmp_path, {"stages": [stage(runtime={"devices": 5})]})
    assert only.runtime.devices == (5,)


def test_numbers_of_env_become_text(tmp_path: Path) -> None:
    (only,) = load(tmp_path, changed("runtime.env", {"A": 1, "B": 0.5, "C": "yes"}))
    assert only.runtime.env == {"A": "1", "B": "0.5", "C": "yes"}


def test_every_sampling_parameter_is_taken(tmp_path: Path) -> None:
    params = {
        "num_inference_steps": 4,
        "guidance_scale": 0,
        "true_cfg_scale": 4.5,
        "strength": 0.6,
        "width": 512,
        "height": 768,
        "num_frames": 33,
        "fps": 16,
        "num_outputs_per_prompt": 2,
        "seed": 0,
        "negative_prompt": "",
        "scheduler": "EulerDiscreteScheduler",
        "output_format": "webp",
        "output_compression": 80,
    }
    (only,) = load(tmp_path, changed("default_sampling_params", params))
    assert only.default_sampling_params == params


def test_a_stage_travels_between_processes(tmp_path: Path) -> None:
    plans = plan_replicas(load(tmp_path, changed("runtime.env", {"A": 1})))
    assert pickle.loads(pickle.dumps(plans)) == plans
    assert copy.deepcopy(plans) == plans


def test_known_keys_without_effect_are_accepted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = {
        "stages": [
            stage(
                runtime={"process": True},
                engine_args={"model_stage": "diffusion"},
                final_output=True,
                final_output_type="image",
                engine_input_source=[],
            )
        ]
    }
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, document) == load(tmp_path, {"stages": [stage()]})
    (record,) = caplog.records
    assert set(record.getMessage().split(": ")[2].split(", ")) == {
        "stages[0].final_output",
        "stages[0].final_output_type",
        "stages[0].engine_input_source",
        "stages[0].runtime.process",
        "stages[0].engine_args.model_stage",
    }


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


def test_a_served_model_name_comes_first(tmp_path: Path) -> None:
    (only,) = load(tmp_path, changed("engine_args.served_model_name", "mine"))
    assert only.model_name == "mine"


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
    assert "the model 'org/c' was given beside" in message
    assert "which has 2 stages" in message
    assert "leave it out and write it into the file" in message


def test_a_model_given_beside_a_malformed_file_hides_nothing(tmp_path: Path) -> None:
    for document in ({"stages": 3}, {"stages": ["x"]}, {"stages": [stage() | {"engine_args": 3}]}):
        assert "is not a" in str(refusal(tmp_path, document, "org/c"))


def test_a_wrong_model_given_beside_the_file_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, changed("engine_args.dtype", "auto"), "./nope")
    assert error.param == "stages[0].engine_args.model"


def test_replicas_are_numbered_on_over_stages_and_hosts(tmp_path: Path) -> None:
    document = {
        "stages": [
            stage("org/a", 0, runtime={"devices": "0,1", "num_replicas": 2}),
            stage("org/b", 1, runtime={"devices": "2"}),
        ]
    }
    stages = load(tmp_path, document)
    assert [(plan.name, plan.stage.model_name) for plan in plan_replicas(stages)] == [
        ("replica0", "org/a"),
        ("replica1", "org/a"),
        ("replica2", "org/b"),
    ]
    shifted = plan_replicas(stages, offset=8)
    assert [plan.index for plan in shifted] == [8, 9, 10]
    assert [plan.name for plan in shifted] == ["replica8", "replica9", "replica10"]
    assert [plan.devices for plan in shifted] == [(0,), (1,), (2,)]


def test_a_replica_is_found_by_its_name_or_refused(tmp_path: Path) -> None:
    plans = plan_replicas(load(tmp_path, changed("engine_args.dtype", "auto")), offset=4)
    assert find_replica(plans, "replica5") is plans[1]
    with pytest.raises(ConfigurationError) as refused:
        find_replica(plans, "replica7")
    assert (
        "'replica7' is not a replica of this host's stage file, which plans replica4, replica5"
        in str(refused.value)
    )
    assert "REPLICA_OFFSET" in str(refused.value)


@st.composite
def planned_stages(draw: st.DrawFn) -> tuple[StageConfig, ...]:
    stages = []
    for stage_id in range(draw(st.integers(1, 4))):
        replicas, each = draw(st.integers(1, 6)), draw(st.integers(1, 4))
        count = replicas * each
        devices = draw(st.lists(st.integers(0, 99), unique=True, min_size=count, max_size=count))
        stages.append(
            StageConfig(
                stage_id=stage_id,
                runtime=RuntimeConfig(devices=tuple(devices), num_replicas=replicas),
                engine_args=EngineArgs("a/b", parallel_config=ParallelConfig(world_size=each)),
            )
        )
    return tuple(stages)


@given(planned_stages(), st.integers(0, 1000))
def test_chunks_are_contiguous_disjoint_and_cover_all(
    stages: tuple[StageConfig, ...], offset: int
) -> None:
    plans = plan_replicas(stages, offset)
    assert [plan.index for plan in plans] == list(range(offset, offset + len(plans)))
    assert all(plan.name == f"replica{plan.index}" for plan in plans)
    for one in stages:
        own = [plan for plan in plans if plan.stage is one]
        assert len(own) == one.runtime.num_replicas
        assert all(len(plan.devices) == one.devices_per_replica for plan in own)
        assert tuple(device for plan in own for device in plan.devices) == one.runtime.devices


def test_another_model_brings_neither_name_nor_defaults_of_the_files_own() -> None:
    own = load_stages(REPOSITORY / "configs" / "tiny_cpu.yaml")[0]
    other = load_stages(REPOSITORY / "configs" / "tiny_cpu.yaml", model="Qwen/Qwen-Image")[0]
    same = load_stages(REPOSITORY / "configs" / "tiny_cpu.yaml", model="./models/tiny")[0]
    assert (other.model_name, dict(other.default_sampling_params)) == ("Qwen/Qwen-Image", {})
    assert other.runtime == own.runtime
    assert same == own


@pytest.mark.parametrize(
    ("written", "world_size", "way"),
    [
        ({}, 1, "auto"),
        ({"world_size": 2}, 2, "auto"),
        ({"world_size": 2, "ulysses_degree": 1}, 2, "auto"),
        ({"cfg_parallel_size": 2}, 2, "cfg"),
        ({"ulysses_degree": 2, "ring_degree": 2}, 4, "context"),
        ({"world_size": 2, "ring_degree": 2}, 2, "context"),
        ({"cfg_parallel_size": 2, "ulysses_degree": 2, "ring_degree": 2}, 8, "context"),
        ({"world_size": 2, "device_map": "balanced"}, 2, "device_map"),
    ],
)
def test_devices_of_a_replica_follow_from_the_degrees(
    tmp_path: Path, written: dict[str, Any], world_size: int, way: str
) -> None:
    (only,) = load(tmp_path, {"stages": [stage(engine_args={"parallel_config": written})]})
    parallel = only.engine_args.parallel_config
    assert (parallel.world_size, parallel.way) == (world_size, way)
    assert only.runtime.devices == tuple(range(world_size))
