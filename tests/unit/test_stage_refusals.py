"""Stage files that are refused: where the fault stands, what was found, and how to fix it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.errors import ConfigurationError
from tests.unit.stage_files import changed, load, refusal, sole, stage


@pytest.mark.parametrize(
    ("path", "written", "expected"),
    [
        ("stage_id", -1, "-1 is out of range; give a whole number from 0"),
        ("stage_id", "a", "'a' is not a whole number"),
        ("engine_input_source", [0], "[0] is not supported: each stage here"),
        ("runtime", 3, "3 is not a mapping; write `key: value` lines beneath it"),
        ("runtime.env", "A=1", "'A=1' is not a mapping; write NAME: \"value\" pairs beneath it"),
        ("engine_args", "org/model", "'org/model' is not a mapping"),
        ("engine_args.dtype", "bf16", "use auto, float32, float16 or bfloat16"),
        ("engine_args.dtype", {}, "names no part; write `default: bfloat16` or `vae: float32`"),
        ("engine_args.device", "tpu", "'tpu' is not available; use auto, cpu or cuda"),
        ("engine_args.max_num_seqs", 0, "0 is out of range; give a whole number from 1 to 1024"),
        ("engine_args.served_model_name", "  ", "is empty; give text such as 'my-model', or leave"),
        ("engine_args.served_model_name", 3, "3 is not text; give text such as 'my-model'"),
        ("engine_args.served_model_name", ["a", " "], "is empty; give text such as 'my-model'"),
        ("engine_args.served_model_name", [["a"]], "is not text; give text such as 'my-model'"),
        ("engine_args.served_model_name", [], "is an empty list; write at least one name"),
        ("engine_args.revision", "", "'' is empty; give text such as 'main', or leave the key out"),
        ("engine_args.parallel_config", 2, "2 is not a mapping"),
        (
            "engine_args.parallel_config.world_size",
            0,
            "0 is out of range; give a whole number from 1",
        ),
        ("engine_args.parallel_config.ring_degree", 0, "0 is out of range; give a whole number"),
        (
            "engine_args.parallel_config.tensor_parallel_size",
            2,
            "2 is not supported; leave it out: ulysses_degree",
        ),
        ("engine_args.parallel_config.device_map", "auto", "use balanced"),
        (
            "engine_args.parallel_config.collective_timeout_s",
            0.5,
            "give a number from 1 to 86400 (seconds)",
        ),
        ("engine_args.scheduler", ["LCM"], "is not a mapping; name a class such as LCMScheduler"),
        ("engine_args.scheduler.shift", -1, "-1 is out of range; give a number from 0.01 to 100"),
        ("engine_args.scheduler.class", 3, "3 is not text; give text such as 'LCMScheduler'"),
        ("engine_args.scheduler.timestep_spacing", "last", "use leading, linspace or trailing"),
        ("engine_args.scheduler.sigmas", [0.5, 1.0], "does not fall; list one number above 0"),
        ("engine_args.scheduler.sigmas", [1.0, 0.0], "is not a list of sigmas; list one number"),
        ("engine_args.flow_shift", "5", "'5' is not a number; give a number from 0.01 to 100"),
        ("default_sampling_params.lora", 3, "3 is not an adapter; write a name, {name: ..., sca"),
        ("default_sampling_params.lora", ["a", "a"], "names 'a' twice; give one scale for it"),
        ("default_sampling_params.lora", "../a", "is not a name for an adapter"),
        ("default_sampling_params.lora", [{"name": "a", "scale": 101}], "has a scale that is out"),
        ("default_sampling_params", [], "[] is not a mapping"),
        (
            "default_sampling_params.num_inference_steps",
            0,
            "0 is out of range; give a whole number",
        ),
        ("default_sampling_params.num_inference_steps", 2.5, "2.5 is not a whole number"),
        ("default_sampling_params.guidance_scale", -1, "-1 is out of range; give a number from 0"),
        ("default_sampling_params.guidance_scale", "3.5", "'3.5' is not a number; give a number"),
        ("default_sampling_params.true_cfg_scale", float("nan"), "nan is not a number"),
        ("default_sampling_params.guidance_scale", float("inf"), "inf is not a number"),
        ("default_sampling_params.guidance_scale", True, "True is not a number"),
        ("default_sampling_params.strength", 1.5, "1.5 is out of range; give a number from 0 to 1"),
        ("default_sampling_params.width", 7, "7 is out of range; give a whole number from 8"),
        ("default_sampling_params.height", 10**6, "1000000 is out of range"),
        ("default_sampling_params.num_frames", 0, "0 is out of range"),
        ("default_sampling_params.fps", 0, "0 is out of range; give a number from 1 to 120"),
        ("default_sampling_params.seed", -1, "-1 is out of range"),
        ("default_sampling_params.seed", 2**63, "9223372036854775808 is out of range"),
        ("default_sampling_params.negative_prompt", 3, "3 is not text; put it in quotes"),
        ("default_sampling_params.output_format", "gif", "use png, jpeg, webp or mp4"),
    ],
)
def test_a_wrong_value(tmp_path: Path, path: str, written: object, expected: str) -> None:
    found, message = sole(refusal(tmp_path, changed(path, written)))
    assert found == f"stages[0].{path}"
    assert expected in message


@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES", "0", "'0' cannot be set here; runtime.devices sets it"),
        ("A", True, 'True is not text; put it in quotes, such as "1"'),
        ("A", None, 'is not text; put it in quotes, such as "1"'),
        ("A=B", "1", "is not a name for an environment variable; use letters, digits and _"),
        ("", "1", "is not a name for an environment variable"),
        ("A", "x\0y", "contains a zero byte; remove it"),
    ],
)
def test_a_wrong_variable(tmp_path: Path, name: str, written: object, expected: str) -> None:
    path, message = sole(refusal(tmp_path, changed("runtime.env", {name: written})))
    assert path == f"stages[0].runtime.env.{name}"
    assert expected in message


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runtime.num_replica", "did you mean num_replicas?"),
        ("runtime.device", "did you mean devices, or does it belong under engine_args?"),
        ("runtime.model", "it belongs under engine_args"),
        ("num_replicas", "it belongs under runtime"),
        ("world_size", "it belongs under engine_args.parallel_config"),
        ("num_replica", "did you mean num_replicas, which belongs under runtime?"),
        ("engin_args", "did you mean engine_args?"),
        ("Runtime", "did you mean runtime?"),
        ("engine_args.modle", "did you mean model?"),
        ("engine_args.tensor_parallel_size", "it belongs under engine_args.parallel_config"),
        ("engine_args.qqq", "remove it (allowed: "),
        ("engine_args.parallel_config.worldsize", "did you mean world_size?"),
        ("default_sampling_params.steps", "did you mean num_inference_steps?"),
        ("default_sampling_params.guidance", "did you mean guidance_scale?"),
        ("xyzzy", "remove it (allowed: "),
    ],
)
@pytest.mark.parametrize("written", [1, None])
def test_an_unknown_key(tmp_path: Path, path: str, expected: str, written: object) -> None:
    error = refusal(tmp_path, changed(path, written))
    found, message = sole(error)
    assert found == f"stages[0].{path}"
    assert message.startswith(f"is an unknown key; {expected}")
    assert error.details[0].code == "unknown_key"


def test_an_unknown_key_at_the_top(tmp_path: Path) -> None:
    document = {"stages": [stage()], "stage_args": []}
    assert sole(refusal(tmp_path, document)) == (
        "stage_args",
        "is an unknown key; did you mean stages?",
    )


def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    document = {"stages": [stage() | {7: 1}]}
    assert sole(refusal(tmp_path, document))[0] == "stages[0].7"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("stage_id", "is missing; write stage_id: 0 for the first stage, 1 for the next"),
        ("stage_type", "is missing; write stage_type: diffusion, the only kind that is supported"),
        ("engine_args", "is missing; write it with `model:` beneath it"),
    ],
)
@pytest.mark.parametrize("null", [False, True])
def test_a_key_that_must_be_there(tmp_path: Path, key: str, expected: str, null: bool) -> None:
    entry = stage()
    entry.pop(key)
    if null:
        entry[key] = None
    error = refusal(tmp_path, {"stages": [entry]})
    assert sole(error) == (f"stages[0].{key}", expected)


def test_a_stage_without_a_model(tmp_path: Path) -> None:
    assert sole(refusal(tmp_path, changed("engine_args", {"dtype": "auto"}))) == (
        "stages[0].engine_args.model",
        "is missing; write one such as 'Qwen/Qwen-Image'",
    )


def test_a_stage_that_is_not_diffusion(tmp_path: Path) -> None:
    entry = stage() | {"stage_type": "llm", "engine_args": {"gpu_memory_utilization": 0.9}}
    path, message = sole(refusal(tmp_path, {"stages": [entry]}))
    assert path == "stages[0].stage_type"
    assert message == (
        "'llm' is not supported: only diffusion stages are; remove the stage, or "
        "serve the file with vLLM-Omni"
    )


def test_replicas_of_a_stage_that_is_not_diffusion(tmp_path: Path) -> None:
    path, message = sole(refusal(tmp_path, changed("stage_type", "llm")))
    assert path == "stages[0].stage_type"
    assert message.startswith(
        "'llm' is not supported and has runtime.num_replicas 2: only diffusion stages can have "
        "replicas; remove the stage"
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("./nope", "'./nope' is not a folder: {here}/nope does not exist; give a diffusers folder"),
        ("/nope/at/all", "'/nope/at/all' is not a folder: /nope/at/all does not exist"),
        ("../nope/", "is not a folder: {above}/nope does not exist"),
        ("~/nope", "is not a folder: {here}/nope does not exist"),
        ("nope", "'nope' is not a folder: {here}/nope does not exist"),
        ("a/b/c", "'a/b/c' is not a folder: {here}/a/b/c does not exist"),
        ("empty", "'empty' is not a pipeline: {here}/empty has no model_index.json"),
        ("empty/inner", "'empty/inner' is not a folder: {here}/empty/inner does not exist"),
        ("./file.safetensors", "is not a folder: {here}/file.safetensors is a file"),
        ("org/name with blanks", "'org/name with blanks' is not a folder or a hub id"),
        ("org/", "'org/' is not a folder or a hub id"),
        ("x" * 5000, "is not a folder"),
        ("", "'' is empty; give text such as 'Qwen/Qwen-Image'"),
        (3, "3 is not text; give text such as 'Qwen/Qwen-Image'"),
    ],
)
def test_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: object, expected: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path, message = sole(refusal(tmp_path, changed("engine_args.model", written)))
    assert path == "stages[0].engine_args.model"
    assert expected.format(here=tmp_path, above=tmp_path.parent) in message
    assert "Qwen/Qwen-Image" in message


def test_two_stages_of_one_id(tmp_path: Path) -> None:
    document = {"stages": [stage("org/a"), stage("org/b")]}
    assert sole(refusal(tmp_path, document)) == (
        "stages[1].stage_id",
        "0 is already the stage_id of stages[0]; use another number",
    )


def test_two_stages_of_one_model_name(tmp_path: Path) -> None:
    document = {"stages": [stage("org/a", 0), stage("org/a", 1)]}
    path, message = sole(refusal(tmp_path, document))
    assert path == "stages[1].engine_args.model"
    assert message == (
        "'org/a' gives this model the name 'org/a', which stages[0] has; set another "
        "served_model_name"
    )
    named = stage("org/b", 1, engine_args={"served_model_name": "org/a"})
    path, _ = sole(refusal(tmp_path, {"stages": [stage("org/a", 0), named]}))
    assert path == "stages[1].engine_args.served_model_name"
    aliased = stage("org/b", 1, engine_args={"served_model_name": ["org/b", "gpt"]})
    others = stage("org/a", 0, engine_args={"served_model_name": ["org/a", "gpt"]})
    path, message = sole(refusal(tmp_path, {"stages": [others, aliased]}))
    assert path == "stages[1].engine_args.served_model_name"
    assert "the name 'gpt', which stages[0] has" in message


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    document = {
        "stages": [
            stage("./nope", 0, runtime={"devices": "0,x", "num_replicas": 0}),
            stage("org/b", 1, engine_args={"dtype": "int4"}, extra=1),
            stage("org/c", 2, runtime={"devices": "0,1"}),
            "not a stage",
        ]
    }
    error = refusal(tmp_path, document)
    assert {detail.param for detail in error.details} == {
        "stages[0].runtime.devices",
        "stages[0].runtime.num_replicas",
        "stages[0].engine_args.model",
        "stages[1].engine_args.dtype",
        "stages[1].extra",
        "stages[2].runtime.devices",
        "stages[3]",
    }
    assert "is refused (7 errors)\n  - stages[0]." in error.message
    assert error.param is None


def test_a_long_value_is_shown_short(tmp_path: Path) -> None:
    assert len(str(refusal(tmp_path, changed("engine_args.dtype", "x" * 10_000)))) < 400


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


PATHS = st.sampled_from(
    [
        "stage_id",
        "stage_type",
        "runtime",
        "runtime.devices",
        "runtime.num_replicas",
        "runtime.env",
        "engine_args",
        "engine_args.model",
        "engine_args.parallel_config",
        "default_sampling_params",
        "default_sampling_params.fps",
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(PATHS, VALUES)
def test_any_value_is_taken_or_refused_by_path(tmp_path: Path, path: str, value: Any) -> None:
    try:
        load(tmp_path, changed(path, value))
    except ConfigurationError as refused:
        params = [detail.param for detail in refused.details]
    else:
        return
    assert params
    assert all(param.startswith("stages[0].") for param in params)


def test_a_wrong_dtype_of_a_part(tmp_path: Path) -> None:
    found, message = sole(refusal(tmp_path, changed("engine_args.dtype", {"vae": "fp32"})))
    assert found == "stages[0].engine_args.dtype.vae"
    assert message.startswith("'fp32' is not available; use auto, float32")
