"""The flat deploy files of vLLM-Omni 0.30: device templates, and refusals by their own paths."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.errors import ConfigurationError
from configs.foreign.dialects import RENAMED, translate
from configs.foreign.keys import BY_PLACE
from configs.stages import plan_replicas
from tests.unit.dialect_files import DEPLOY, FILES, SCHEMAS, STAGE_ARGS, deploy
from tests.unit.stage_files import load, refusal, sole


def test_no_key_of_a_deploy_file_is_lost() -> None:
    """Every key is in the document, or listed, or it is the model's pipeline-wide twin."""
    found = translate(yaml.safe_load((FILES / "qwen_image_deploy.yaml").read_text()))
    assert not found.faults
    (stage,) = found.document["stages"]
    assert stage["runtime"].keys() == {"devices", "num_replicas", "env"}
    assert stage["engine_args"].keys() == {"dtype", "max_num_seqs", "parallel_config"}
    assert set(found.ignored) == {
        "pipeline",
        "async_chunk",
        "trust_remote_code",
        "distributed_executor_backend",
        "platforms.npu",
        "stages[0].gpu_memory_utilization",
        "stages[0].enforce_eager",
        "stages[0].model_class_name",
        "stages[0].parallel_config.enable_expert_parallel",
        "stages[0].parallel_config.sequence_parallel_size",
        "stages[0].parallel_config.vae_patch_parallel_size",
        "stages[0].parallel_config.use_hsdp",
        "stages[0].parallel_config.hsdp_shard_size",
        "stages[0].parallel_config.hsdp_replicate_size",
    }


@pytest.mark.parametrize(
    ("devices", "replicas", "degree", "chunks"),
    [
        ("0", 3, 1, [(0,), (1,), (2,)]),
        (0, 2, 1, [(0,), (1,)]),
        ("0,1", 2, 2, [(0, 1), (2, 3)]),
        ([1, 0], 2, 2, [(1, 0), (3, 2)]),
        ("4,5,6,7", 2, 2, [(4, 5), (6, 7)]),
        ("3,1", 2, 1, [(3,), (1,)]),
        ("2,3", 1, 2, [(2, 3)]),
        (None, 2, 2, [(0, 1), (2, 3)]),
    ],
)
def test_devices_of_one_replicas_length_are_a_template(
    tmp_path: Path, devices: Any, replicas: int, degree: int, chunks: list[tuple[int, ...]]
) -> None:
    document = deploy(devices=devices, num_replicas=replicas, cfg_parallel_size=degree)
    plans = plan_replicas(load(tmp_path, document))
    assert [plan.devices for plan in plans] == chunks


@pytest.mark.parametrize("devices", ["1", "0,0", "2,3"])
def test_a_template_that_is_none_is_refused(tmp_path: Path, devices: str) -> None:
    degree = len(devices.split(","))
    document = deploy(devices=devices, num_replicas=3, cfg_parallel_size=degree)
    path, message = sole(refusal(tmp_path, document))
    assert path == "stages[0].devices"
    assert message == (
        f"{devices!r} has the length of one replica ({degree}), so it is a template for each of 3; "
        f"write 0 to {degree - 1}, each once, or all {3 * degree} devices"
    )


def test_only_the_deploy_dialect_has_templates(tmp_path: Path) -> None:
    document = copy.deepcopy(STAGE_ARGS)
    document["stage_args"][0]["runtime"]["devices"] = "0"
    path, message = sole(refusal(tmp_path, document))
    assert path == "stage_args[0].runtime.devices"
    assert "names 1 device, and exactly 2 are needed" in message


@pytest.mark.parametrize(
    ("keys", "path", "expected"),
    [
        ({"num_replicas": 0}, "stages[0].num_replicas", "0 is out of range; give a whole number"),
        ({"devices": "0,x"}, "stages[0].devices", "'0,x' names device 'x'"),
        (
            {"devices": "0,1,2"},
            "stages[0].devices",
            "2 replicas (num_replicas) x 1 device each (parallel_config.world_size); name 2",
        ),
        ({"env": {"A": True}}, "stages[0].env.A", "True is not text"),
        ({"dtype": "int4"}, "stages[0].dtype", "'int4' is not available; use "),
        ({"model": "./nope"}, "stages[0].model", "'./nope' is not a folder"),
        ({"ring_degree": 0}, "stages[0].ring_degree", "0 is out of range"),
        (
            {"parallel_config": {"tensor_parallel_size": 2}},
            "stages[0].parallel_config.tensor_parallel_size",
            "2 is not supported; leave it out",
        ),
        ({"parallel_config": 2}, "stages[0].parallel_config", "2 is not a mapping"),
        ({"engine_args": {"dtype": 3}}, "stages[0].engine_args.dtype", "3 is not available"),
        ({"engine_args": 3}, "stages[0].engine_args", "3 is not a mapping; write its keys into"),
        ({"num_replica": 2}, "stages[0].num_replica", "did you mean num_replicas?"),
        (
            {"parallel_config": {"dtype": "auto"}},
            "stages[0].parallel_config.dtype",
            "it belongs in the",
        ),
        ({"parallel_config": {"ring": 2}}, "stages[0].parallel_config.ring", "mean ring_degree?"),
        ({"runtime": {"max_num_seqs": 2}}, "stages[0].runtime.max_num_seqs", "in the stage itself"),
        ({"qqq": 2}, "stages[0].qqq", "is an unknown key; remove it (allowed: "),
        ({"boundary_ratio": 0.8}, "stages[0].boundary_ratio", "0.8 is not supported"),
        (
            {"use_hsdp": True},
            "stages[0].use_hsdp",
            "True is not supported: it is another way to split a model",
        ),
        (
            {"sequence_parallel_size": 2},
            "stages[0].sequence_parallel_size",
            "2 is not ulysses_degree x ring_degree; write those",
        ),
        (
            {"stage_type": "llm"},
            "stages[0].stage_type",
            "'llm' is not supported and has num_replicas",
        ),
        ({"is_comprehension": True}, "stages[0].is_comprehension", "marks a language model"),
        (
            {"runtime": {"devices": "2,3"}},
            "stages[0].runtime.devices",
            "'2,3' differs from stages[0].devices; keep one of the two",
        ),
        (
            {"max_batch_size": 4, "max_num_seqs": 2},
            "stages[0].max_batch_size",
            "4 is the older name of max_num_seqs, which is 2",
        ),
        (
            {"default_sampling_params": {"layers": 4}},
            "stages[0].default_sampling_params.layers",
            "",
        ),
    ],
)
def test_a_deploy_file_is_refused_by_the_paths_it_has(
    tmp_path: Path, keys: dict[str, Any], path: str, expected: str
) -> None:
    found, message = sole(refusal(tmp_path, deploy(**keys)))
    assert found == path
    assert expected in message
    assert "engine_args" not in message
    assert "under runtime" not in message


FLAT_KEYS = sorted(
    {"env", "runtime", "engine_args", "parallel_config", "default_sampling_params", "stage_id"}
    | {name for place, schema in SCHEMAS.items() if place != "file" for name in schema().fields}
    | {name for place, keys in BY_PLACE.items() if place != "file" for name in keys}
    | {"sequence_parallel_size", "unheard_of", "model"}
    | {old for _, old, _ in RENAMED}
)


SCALARS = st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["", "0,1", "auto", "x"])


VALUES = (
    SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(FLAT_KEYS), SCALARS)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(FLAT_KEYS), VALUES, max_size=4))
def test_any_deploy_file_is_taken_or_refused_by_paths_that_it_has(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    document = deploy(**keys)
    try:
        load(tmp_path, document)
    except ConfigurationError as refused:
        for detail in refused.details:
            place = detail.param.removeprefix("stages[0].").split(".")
            assert detail.code == "missing" or place[0].split("[")[0] in document["stages"][0], (
                detail.param
            )


def test_a_wrong_section_within_a_section_is_named_where_it_stands(tmp_path: Path) -> None:
    document = deploy(engine_args={"parallel_config": False})
    found, message = sole(refusal(tmp_path, document))
    assert found == "stages[0].engine_args.parallel_config"
    assert "False is not a mapping" in message


@pytest.mark.parametrize(
    ("keys", "path", "expected"),
    [
        (
            {"base_config": "a.yaml"},
            "base_config",
            "'a.yaml' is no file in ",
        ),
        (
            {"edges": [{"from": 0, "to": 1}]},
            "edges",
            "is not supported: each stage here answers requests on its own",
        ),
        (
            {"platforms": {"cpu": {}}},
            "platforms.cpu",
            "is not supported; write its values into the stages",
        ),
        (
            {"session_mode": "duplex"},
            "session_mode",
            "'duplex' is not supported: it is for conversations",
        ),
        ({"data_parallel_size": 2}, "data_parallel_size", "2 is not supported; leave it out"),
        ({"dtype": "int4"}, "dtype", "'int4' is not available; use "),
        ({"surprise": 1}, "surprise", "is an unknown key"),
    ],
)
def test_a_key_for_the_whole_file_is_refused_by_its_name(
    tmp_path: Path, keys: dict[str, Any], path: str, expected: str
) -> None:
    found, message = sole(refusal(tmp_path, {**DEPLOY, **keys}))
    assert found == path
    assert expected in message


def test_settings_of_the_pipeline_are_taken_from_the_flat_stage(tmp_path: Path) -> None:
    document = deploy(
        vae_use_slicing=True,
        vae_use_tiling=False,
        cache_backend=None,
        cache_config=None,
        enable_cache_dit_summary=False,
        diffusion_compile_granularity="regional",
        diffusion_quantization_config="int8",
    )
    (stage,) = load(tmp_path, document)
    pipeline = stage.engine_args.pipeline
    assert (pipeline.vae_use_slicing, pipeline.vae_use_tiling) == (True, False)
    assert pipeline.diffusion_compile_granularity == "regional"
    assert pipeline.quantization is not None
    assert pipeline.quantization.method == "int8"
    (stage,) = load(tmp_path, {**DEPLOY, "quantization": "fp8"})
    assert stage.engine_args.pipeline.quantization is not None
    assert sole(refusal(tmp_path, deploy(quantization_config="w4a4")))[0] == (
        "stages[0].quantization_config.method"
    )
    path, message = sole(refusal(tmp_path, deploy(cache_backend="cache_dit")))
    assert path == "stages[0].cache_backend"
    assert "'cache_dit' is not available; use " in message


def test_eager_execution_and_compiling_exclude_each_other(tmp_path: Path) -> None:
    document = deploy(enforce_eager=True, diffusion_compile_granularity="regional")
    found = {fault.param: fault.message for fault in refusal(tmp_path, document).details}
    assert found["stages[0].enforce_eager"] == (
        "True contradicts diffusion_compile_granularity (regional); keep one"
    )


def test_a_stage_may_differ_from_the_whole_file(tmp_path: Path) -> None:
    (stage,) = load(tmp_path, {**deploy(dtype="float16"), "dtype": "bfloat16"})
    assert stage.engine_args.dtype == "float16"
    (stage,) = load(tmp_path, {**DEPLOY, "dtype": "bfloat16"})
    assert stage.engine_args.dtype == "bfloat16"


def test_a_file_lies_over_its_base_and_values_for_cuda_over_both(tmp_path: Path) -> None:
    """Stages meet by their number, mappings key by key; the upper file's values count."""
    base = deploy(
        max_num_seqs=2,
        default_sampling_params={"num_inference_steps": 4, "guidance_scale": 2.0},
    )
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**base, "trust_remote_code": True}))
    over = {
        "base_config": "base.yaml",
        "stages": [{"stage_id": 0, "default_sampling_params": {"num_inference_steps": 9}}],
        "platforms": {
            "cuda": {"stages": [{"stage_id": 0, "devices": "4,5"}, {"stage_id": 7, "x": 1}]},
            "npu": {"stages": [{"stage_id": 0, "devices": "9"}]},
        },
    }
    (stage,) = load(tmp_path, over)
    sampling = stage.default_sampling_params
    assert (sampling["num_inference_steps"], sampling["guidance_scale"]) == (9, 2.0)
    assert stage.runtime.devices == (4, 5)
    assert (stage.runtime.num_replicas, stage.engine_args.max_num_seqs) == (2, 2)


def test_bases_in_a_circle_are_refused(tmp_path: Path) -> None:
    document = {"base_config": "stages.yaml", **DEPLOY}
    assert "base_config leads over more than" in refusal(tmp_path, document).message


@pytest.mark.parametrize("model", [None, "org/other"])
@pytest.mark.parametrize(
    ("document", "path", "expected"),
    [
        (
            {"pipeline": "speech", "stages": [{"stage_id": 0}, {"stage_id": 1, "surprise": 1}]},
            "stages",
            "links 2 stages of one model",
        ),
        (
            {"stage_args": [{"stage_id": 0, "stage_type": "llm"}, {"stage_id": 1}]},
            "stage_args",
            "links 2 stages of one model",
        ),
        ({**DEPLOY, "pipeline": "omnivoice"}, "pipeline", "is a speech model"),
        ({**DEPLOY, "pipeline": "soulxsinger_svc"}, "pipeline", "is a speech model"),
        (
            deploy(default_sampling_params={"temperature": 0.0}),
            "stages[0].default_sampling_params.temperature",
            "is read by language and speech models alone",
        ),
        (
            deploy(engine_args={"hf_overrides": {}}, trust_remote_code=True),
            "stages[0].engine_args.hf_overrides",
            "is read by language and speech models alone",
        ),
    ],
)
def test_a_file_for_no_diffusion_model_is_refused_by_that_alone(
    tmp_path: Path, document: dict[str, Any], path: str, expected: str, model: str | None
) -> None:
    """The reason is the same whether a model is given beside the file."""
    found, message = sole(refusal(tmp_path, document, model))
    assert found == path
    assert expected in message
    assert message.endswith("serve this file with vLLM-Omni")
