"""The dialects of stage files end in the same stages, and nothing is dropped in silence."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from configs.devices import check_machine
from configs.errors import ConfigurationError
from configs.machine import Machine
from configs.stages import load_stages, reference_document
from scripts.launcher.run_folder import RunFolder
from tests.unit.dialect_files import FILES, STAGE_ARGS, deploy
from tests.unit.stage_files import REPOSITORY, load


@pytest.mark.parametrize(
    ("family", "model"),
    [("qwen_image", "Qwen/Qwen-Image"), ("wan22", "Wan-AI/Wan2.2-T2V-A14B-Diffusers")],
)
@pytest.mark.parametrize("dialect", ["stage_args", "deploy"])
def test_every_dialect_ends_in_the_same_stage(family: str, model: str, dialect: str) -> None:
    expected = load_stages(FILES / f"{family}_reference.yaml")
    assert load_stages(FILES / f"{family}_{dialect}.yaml", model) == expected
    (stage,) = expected
    assert stage.engine_args.model == model
    assert dict(stage.default_sampling_params), "defaults of a file that names no model are kept"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "qwen_image_reference",
            (
                "stages[0].final_output, stages[0].final_output_type, stages[0].runtime.process, "
                "stages[0].engine_args.model_class_name"
            ),
        ),
        (
            "qwen_image_stage_args",
            (
                "runtime.enabled, runtime.defaults, stage_args[0].engine_input_source, "
                "stage_args[0].final_output, stage_args[0].final_output_type, "
                "stage_args[0].runtime.process, stage_args[0].engine_args.model_stage, "
                "stage_args[0].engine_args.model_class_name, "
                "stage_args[0].engine_args.enforce_eager, "
                "stage_args[0].engine_args.distributed_executor_backend, "
                "stage_args[0].engine_args.parallel_config.use_hsdp, "
                "stage_args[0].engine_args.parallel_config.sequence_parallel_size"
            ),
        ),
        (
            "wan22_deploy",
            (
                "pipeline, edges, stages[0].runtime.log_level, stages[0].step_execution, "
                "stages[0].request_batch_max_wait_ms"
            ),
        ),
    ],
)
def test_what_has_no_effect_is_listed_once(
    file: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = FILES / f"{file}.yaml"
    with caplog.at_level(logging.WARNING):
        load_stages(path, "org/model")
    (record,) = caplog.records
    assert record.getMessage() == f"{path}: these keys have no effect here: {expected}"


def test_devices_that_are_not_there_are_named_as_the_file_names_them(tmp_path: Path) -> None:
    machine = Machine(0, (0,))
    for document, path in (
        (deploy(), "stages[0].devices"),
        (STAGE_ARGS, "stage_args[0].runtime.devices"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            check_machine(load(tmp_path, document), machine)
        assert refused.value.param == path
    with pytest.raises(ConfigurationError) as refused:
        check_machine(load(tmp_path, deploy(device="cuda")), machine)
    assert refused.value.param == "stages[0].device"


def test_the_parts_get_the_file_in_the_reference_dialect(tmp_path: Path) -> None:
    model = "Qwen/Qwen-Image"
    given = FILES / "qwen_image_deploy.yaml"
    stages = load_stages(given, model)
    folder = RunFolder(tmp_path / "run")
    (expected,) = load_stages(FILES / "qwen_image_reference.yaml")
    (found,) = load_stages(folder.write_stages(reference_document(given), stages, str(given)))
    assert found.engine_args.served_model_name == model
    unnamed = replace(found.engine_args, served_model_name=None)
    assert replace(found, engine_args=unnamed) == expected
    assert reference_document(given, model)["stages"][0]["runtime"]["devices"] == [0, 1, 2, 3]


def test_the_parts_do_not_get_the_defaults_of_a_model_that_was_replaced(tmp_path: Path) -> None:
    given = REPOSITORY / "configs" / "tiny_cpu.yaml"
    stages = load_stages(given, "org/other")
    (found,) = load_stages(
        RunFolder(tmp_path / "run").write_stages(reference_document(given), stages, "")
    )
    assert (found.model_name, dict(found.default_sampling_params)) == ("org/other", {})
