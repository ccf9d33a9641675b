"""Memory and speed settings and adapters in a stage file: their form, and what excludes what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.adapter_fields import LoraSource
from configs.errors import ConfigurationError
from configs.scheduler_fields import SchedulerSettings
from configs.stage_config import PipelineSettings, Quantization
from configs.stage_fields import WarmupShape
from tests.unit.stage_files import changed, load, refusal, sole, stage
from tests.unit.test_stage_refusals import VALUES

KEYS = sorted(PipelineSettings.__dataclass_fields__)


def loaded(folder: Path, **args: Any) -> PipelineSettings:
    return load(folder, {"stages": [stage(engine_args=args)]})[0].engine_args.pipeline


def test_nothing_is_on_that_was_not_asked_for(tmp_path: Path) -> None:
    assert loaded(tmp_path) == PipelineSettings()
    assert loaded(tmp_path, cache_backend="none") == PipelineSettings()


def test_every_setting_is_read(tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "w.gguf").touch()
    written: dict[str, Any] = {
        "vae_use_slicing": True,
        "vae_use_tiling": True,
        "enable_cpu_offload": False,
        "enable_layerwise_offload": False,
        "quantization": {
            "method": "gguf",
            "components": ["transformer"],
            "gguf_file": str(tmp_path / "w.gguf"),
        },
        "cache_backend": "first_block_cache",
        "cache_config": {"threshold": 0.1},
        "attention_backend": "flash",
        "channels_last": True,
        "diffusion_compile_granularity": "none",
        "diffusion_compile_dynamic": False,
        "warmup_shapes": ["512x256", "832x480x81"],
        "lora_dir": str(tmp_path / "loras"),
        "lora_modules": {
            "a": str(tmp_path / "a.safetensors"),
            "b": {"path": "org/b", "weight_name": "x.safetensors", "revision": "v1"},
        },
        "max_cpu_loras": 3,
        "enable_prompt_embed_cache": False,
        "prompt_embed_cache_bytes": 1000,
    }
    assert sorted(written) == KEYS
    assert loaded(tmp_path, **written) == PipelineSettings(
        vae_use_slicing=True,
        vae_use_tiling=True,
        quantization=Quantization("gguf", ("transformer",), str(tmp_path / "w.gguf")),
        cache_backend="first_block_cache",
        cache_config={"threshold": 0.1},
        attention_backend="flash",
        channels_last=True,
        diffusion_compile_dynamic=False,
        warmup_shapes=(WarmupShape(512, 256), WarmupShape(832, 480, 81)),
        lora_dir=str(tmp_path / "loras"),
        lora_modules={
            "a": LoraSource(str(tmp_path), "a.safetensors"),
            "b": LoraSource("org/b", "x.safetensors", "v1"),
        },
        max_cpu_loras=3,
        enable_prompt_embed_cache=False,
        prompt_embed_cache_bytes=1000,
    )


def test_quantization_may_be_one_word(tmp_path: Path) -> None:
    assert loaded(tmp_path, quantization="int8").quantization == Quantization("int8")


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("vae_use_slicing", "yes", "'yes' is not a boolean; use true"),
        ("vae_use_tiling", 1, "1 is not a boolean; use true"),
        ("cache_backend", "tea_cache", "use none, first_block_cache, taylorseer_cache"),
        ("cache_config", {"threshold": 1}, "needs cache_backend; set it"),
        ("attention_backend", "", "is empty; give text such as 'native'"),
        ("diffusion_compile_granularity", "full", "use none or regional"),
        ("warmup_shapes", "64x64", "is not a list; write sizes such as"),
        ("warmup_shapes", ["64"], "contains '64', which is not a size"),
        ("warmup_shapes", ["0x64"], "contains '0x64', which is not a size"),
        ("lora_dir", "./nowhere", "is not an existing folder"),
        ("max_cpu_loras", 0, "0 is out of range; give a whole number from 1"),
        ("prompt_embed_cache_bytes", 0, "0 is out of range; give a whole number from 1"),
        ("lora_modules", ["a"], "is not a mapping; write `name: path` lines"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(
    tmp_path: Path, key: str, written: Any, expected: str
) -> None:
    path, message = sole(refusal(tmp_path, changed(f"engine_args.{key}", written)))
    assert path == f"stages[0].engine_args.{key}"
    assert expected in message


@pytest.mark.parametrize(
    ("key", "written", "where", "expected"),
    [
        ("quantization", "int3", "quantization.method", "use int8, fp8, bitsandbytes_8bit"),
        (
            "quantization",
            {"method": "gguf"},
            "quantization.gguf_file",
            "is required with method gguf",
        ),
        (
            "quantization",
            {"method": "int8", "gguf_file": __file__},
            "quantization.gguf_file",
            "is required with method gguf and refused with others",
        ),
        (
            "quantization",
            {"method": "gguf", "gguf_file": "./no.gguf"},
            "quantization.gguf_file",
            "is not an existing file",
        ),
        ("lora_modules", {"../x": "org/x"}, "lora_modules.../x", "is not a name for an adapter"),
        ("lora_modules", {"x": "./no"}, "lora_modules.x", "is not an existing file or folder"),
        ("lora_modules", {"x": 3}, "lora_modules.x", "is not text or a mapping with path"),
        (
            "lora_modules",
            {"x": {"path": "org/x", "weight_name": "../secret.safetensors"}},
            "lora_modules.x",
            "which is not a .safetensors file in the folder",
        ),
        (
            "lora_modules",
            {"x": {"path": "org/x", "weight_name": "x.bin"}},
            "lora_modules.x",
            "which is not a .safetensors file in the folder",
        ),
        (
            "lora_modules",
            {"x": __file__},
            "lora_modules.x",
            "test_pipeline_schema.py, which is not a .safetensors file",
        ),
    ],
)
def test_a_wrong_part_of_a_mapping_is_refused_by_its_path(
    tmp_path: Path, key: str, written: Any, where: str, expected: str
) -> None:
    path, message = sole(refusal(tmp_path, changed(f"engine_args.{key}", written)))
    assert path == f"stages[0].engine_args.{where}"
    assert expected in message


@pytest.mark.parametrize(
    ("args", "key", "expected"),
    [
        (
            {"cache_backend": "mag_cache", "max_num_seqs": 2},
            "cache_backend",
            "requests cannot share steps; set max_num_seqs to 1",
        ),
        (
            {"enable_cpu_offload": True, "max_num_seqs": 2},
            "enable_cpu_offload",
            "set max_num_seqs to 1, or use enable_layerwise_offload",
        ),
        (
            {"enable_cpu_offload": True, "enable_layerwise_offload": True},
            "enable_layerwise_offload",
            "cannot be combined with enable_cpu_offload",
        ),
        (
            {"enable_layerwise_offload": True, "parallel_config": {"world_size": 2}},
            "enable_layerwise_offload",
            "supports one device, and a replica has 2",
        ),
        (
            {"enable_cpu_offload": True, "lora_modules": {"a": "org/a"}},
            "enable_cpu_offload",
            "cannot be combined with adapters",
        ),
        (
            {"diffusion_compile_granularity": "regional", "lora_modules": {"a": "org/a"}},
            "diffusion_compile_granularity",
            "cannot be combined with adapters",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    tmp_path: Path, args: dict[str, Any], key: str, expected: str
) -> None:
    path, message = sole(refusal(tmp_path, {"stages": [stage(engine_args=args)]}))
    assert path == f"stages[0].engine_args.{key}"
    assert expected in message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(KEYS), VALUES)
def test_any_value_is_taken_or_refused_by_path(tmp_path: Path, key: str, value: Any) -> None:
    try:
        load(tmp_path, changed(f"engine_args.{key}", value))
    except ConfigurationError as refused:
        params = [detail.param for detail in refused.details]
    else:
        return
    assert all(param.startswith("stages[0]") for param in params)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"scheduler": "LCMScheduler"}, SchedulerSettings("LCMScheduler")),
        (
            {"scheduler": {"class": "EulerDiscreteScheduler", "timestep_spacing": "trailing"}},
            SchedulerSettings("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
        ),
        (
            {"scheduler": {"sigmas": [1, 0.5], "shift": 3}},
            SchedulerSettings(None, {"shift": 3.0}, (1.0, 0.5)),
        ),
        ({"flow_shift": 5.0}, SchedulerSettings(None, {"flow_shift": 5.0})),
        (
            {"flow_shift": 5.0, "scheduler": "UniPCMultistepScheduler"},
            SchedulerSettings("UniPCMultistepScheduler", {"flow_shift": 5.0}),
        ),
        ({}, None),
    ],
)
def test_the_scheduler_of_a_stage_is_read(
    tmp_path: Path, written: dict[str, Any], read: SchedulerSettings | None
) -> None:
    (found,) = load(tmp_path, {"stages": [stage(engine_args=written)]})
    assert found.engine_args.scheduler == read
    deploy = {"stages": [{"stage_id": 0, "model": "org/model", "devices": 0, **written}]}
    assert load(tmp_path, deploy)[0].engine_args.scheduler == read


def test_a_shift_is_said_once(tmp_path: Path) -> None:
    twice = {"flow_shift": 5.0, "scheduler": {"shift": 3.0}}
    path, message = sole(refusal(tmp_path, {"stages": [stage(engine_args=twice)]}))
    assert path == "stages[0].engine_args.flow_shift"
    assert "stands under scheduler too; keep one of the two" in message
    both = changed("engine_args.scheduler", {"shift": 3.0, "flow_shift": 3.0})
    assert "says the same as shift" in sole(refusal(tmp_path, both))[1]


@pytest.mark.parametrize(
    "written", ["fast", {"name": "fast"}, [{"name": "fast", "scale": 1}], ["fast"]]
)
def test_the_adapters_of_each_request_are_read(tmp_path: Path, written: Any) -> None:
    (found,) = load(tmp_path, changed("default_sampling_params.lora", written))
    assert found.default_sampling_params["lora"] == [{"name": "fast", "scale": 1.0}]
