"""Stages that are right: what a file becomes."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from configs.stage_config import EngineArgs, ParallelConfig, RuntimeConfig, StageConfig
from configs.stages import load_stages, plan_replicas
from tests.unit.stage_files import REPOSITORY, changed, load, stage

CONFIGS = REPOSITORY / "configs"


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
