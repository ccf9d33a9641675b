"""A model without a stage file: what is made for it on a host with GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.errors import ConfigurationError
from configs.settings import REPOSITORY, load_settings
from configs.stages import load_stages
from scripts.launcher.model_alone import Fit, Weights, fit, weights_of
from scripts.launcher.preflight import Planned, check_stages
from scripts.launcher.run_folder import RunFolder

GB = 10**9
# As nvidia-smi has them: L4, L40S and H100, in bytes.
GPU_24, GPU_48, GPU_80 = (mib * 2**20 for mib in (23034, 46068, 81559))
HOST = 1024 * GB


@pytest.mark.parametrize(
    ("model", "gpus", "gpu", "expected"),
    [
        ("stabilityai/stable-diffusion-xl-base-1.0", 4, GPU_24, Fit(4, max_num_seqs=2)),
        ("stabilityai/sdxl-turbo", 1, GPU_24, Fit(1, max_num_seqs=4)),
        ("black-forest-labs/FLUX.1-dev", 8, GPU_80, Fit(8)),
        ("black-forest-labs/FLUX.1-dev", 1, GPU_24, Fit(1, 1, "enable_layerwise_offload", 4)),
        ("Qwen/Qwen-Image", 8, GPU_80, Fit(8)),
        ("black-forest-labs/FLUX.2-dev", 8, 2 * GPU_80, Fit(8)),
        ("Tongyi-MAI/Z-Image-Turbo", 1, GPU_24, Fit(1, 1, "enable_cpu_offload")),
        ("Tongyi-MAI/Z-Image-Turbo", 5, GPU_24, Fit(2, gpus_each=2)),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", 1, GPU_80, Fit(1, 1, "enable_cpu_offload")),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", 8, GPU_80, Fit(4, gpus_each=2)),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", 2, GPU_24, Fit(2, 1, "enable_layerwise_offload")),
        ("org/unknown", 3, GPU_80, Fit(3)),
    ],
)
def test_a_model_gets_as_many_replicas_as_its_weights_leave_room_for(
    model: str, gpus: int, gpu: int, expected: Fit
) -> None:
    assert fit(weights_of(model), gpus, gpu, HOST) == expected


def test_weights_on_the_host_are_there_for_each_replica() -> None:
    weights = Weights({"transformer": 40 * GB, "text_encoder": 15 * GB})
    assert fit(weights, 8, GPU_24, 256 * GB).replicas == 3
    assert fit(weights, 8, GPU_24, 32 * GB).replicas == 1
    assert fit(weights, 8, None, 32 * GB) == Fit(8)


def test_the_weights_of_a_folder_are_those_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for name in ("transformer/model.safetensors", "vae/model.safetensors"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(bytes(3))
    (folder / "vae" / "model.fp16.safetensors").write_bytes(bytes(9))
    assert weights_of(str(folder)) is None  # no pipeline
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    assert weights_of(str(folder)) == Weights({"transformer": 3, "vae": 3})


def gpus(root: Path, *mebibytes: int) -> Path:
    """A host with GPUs of so much memory, as WSL2 shows them."""
    program = root / "usr" / "bin" / "nvidia-smi"
    program.parent.mkdir(parents=True)
    (root / "dev").mkdir()
    (root / "dev" / "dxg").touch()
    lines = "\n".join(map(str, mebibytes))
    names = "\n".join(f"GPU {number}: x" for number in range(len(mebibytes)))
    program.write_text(f"#!/bin/sh\ntest $1 = -L && echo '{names}' || echo '{lines}'\n")
    program.chmod(0o755)
    return root


def served(model: str, root: Path, *, alone: bool = True) -> Planned:
    return check_stages(load_settings({}), model, {}, alone=alone, root=root)


def test_a_model_alone_is_served_on_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("configs.machine.find_spec", lambda _: None)  # whatever torch is here
    planned = served("Tongyi-MAI/Z-Image-Turbo", gpus(tmp_path, 81559, 24564))
    assert [(plan.name, plan.devices) for plan in planned.plans] == [("replica0", (0, 1))]
    assert planned.said == (
        "no stage file: Tongyi-MAI/Z-Image-Turbo has weights of 20.5 GB; 1 replica of 2 GPUs with "
        "25.8 GB each, its parts spread over them"
    )
    folder = RunFolder(tmp_path / "run")
    written = folder.write_stages(planned.document, planned.stages, planned.said)
    (stage,) = load_stages(written)
    assert stage.engine_args.parallel_config.device_map == "balanced"
    assert stage.engine_args.device == "auto"


def test_a_stage_file_that_was_named_is_served_as_it_is(tmp_path: Path) -> None:
    tiny = str(REPOSITORY / "models" / "tiny")
    for planned in (
        served(tiny, gpus(tmp_path, 24564), alone=False),
        served(tiny, tmp_path / "no-gpus"),
    ):
        assert planned.said is None
        assert [stage.engine_args.device for stage in planned.stages] == ["cpu"]


def test_a_model_alone_is_refused_where_torch_cannot_use_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    with pytest.raises(
        ConfigurationError, match=r"this host has a GPU .* and /dev has none of its"
    ):
        served("Tongyi-MAI/Z-Image-Turbo", tmp_path)
