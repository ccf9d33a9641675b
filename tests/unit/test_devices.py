"""Devices: what a machine is found to have, what it refuses, and what a replica's process gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.devices import (
    Machine,
    check_machine,
    core_affinity,
    detect_machine,
    device_environment,
)
from configs.errors import ConfigurationError
from configs.stage_config import StageConfig
from configs.stages import load_stages, plan_replicas
from tests.unit.stage_files import REPOSITORY, load, stage

TWO_CORES = Machine(cuda_count=0, cpu_cores=(4, 6))
FOUR_GPUS = Machine(cuda_count=4, cpu_cores=(0, 1))


def refusal(stages: tuple[StageConfig, ...], machine: Machine) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as refused:
        check_machine(stages, machine)
    return refused.value


def gpu_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_gpus_are_counted_by_their_files(tmp_path: Path) -> None:
    folder = gpu_files(
        tmp_path, "nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"
    )
    machine = detect_machine({}, folder)
    assert machine.cuda_count == 3
    assert (machine.kind, machine.count) == ("cuda", 3)


def test_without_gpus_devices_are_the_cores_this_process_may_use(tmp_path: Path) -> None:
    machine = detect_machine({}, tmp_path)
    assert (machine.kind, machine.cuda_count) == ("cpu", 0)
    assert machine.cpu_cores == tuple(sorted(os.sched_getaffinity(0)))
    assert machine.count == len(machine.cpu_cores)
    more = detect_machine({}, tmp_path, cpu_devices=2 * machine.count + 1)
    assert more.cpu_cores == (*machine.cpu_cores, *machine.cpu_cores, machine.cpu_cores[0])


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("3,1", 2),
        (" 3 , 1 ", 2),
        ("0,-1,1", 1),
        ("GPU-8f1e,MIG-22c4", 2),
    ],
)
def test_visible_devices_come_before_device_files(tmp_path: Path, listed: str, count: int) -> None:
    folder = gpu_files(tmp_path, "nvidia0", "nvidia1", "nvidia2", "nvidia3")
    assert detect_machine({"CUDA_VISIBLE_DEVICES": listed}, folder).cuda_count == count


def test_a_gpu_made_visible_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        detect_machine({"CUDA_VISIBLE_DEVICES": "1,1"}, tmp_path)
    assert str(refused.value) == (
        "CUDA_VISIBLE_DEVICES: '1,1' names device 1 twice; name each device once"
    )


def test_detection_does_not_import_torch() -> None:
    script = (
        "import os, sys\n"
        "from configs.devices import detect_machine\n"
        "detect_machine(os.environ)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False).returncode == 0
    )


def test_devices_the_machine_has_are_accepted(tmp_path: Path) -> None:
    check_machine(load_stages(REPOSITORY / "configs" / "qwen_image_4x1.yaml"), FOUR_GPUS)
    check_machine(
        load(tmp_path, {"stages": [stage(runtime={"devices": [1, 0], "num_replicas": 2})]}),
        TWO_CORES,
    )


def test_cores_the_machine_does_not_have_are_refused() -> None:
    stages = load_stages(REPOSITORY / "configs" / "qwen_image_4x1.yaml")
    assert str(refusal(stages, TWO_CORES)) == (
        "this machine does not fit the stage file: stages[0].runtime.devices: "
        "asks for devices 2, 3; this machine has 2 CPU cores, 0 to 1, and no CUDA device; use "
        "these, or lower num_replicas"
    )


def test_gpus_the_machine_does_not_have_are_refused() -> None:
    stages = load_stages(REPOSITORY / "configs" / "wan22_t2v_4x2.yaml")
    error = refusal(stages, FOUR_GPUS)
    assert error.param == "stages[0].runtime.devices"
    assert "asks for devices 4, 5, 6, 7; this machine has 4 CUDA devices, 0 to 3;" in str(error)
    assert "CPU" not in str(error)


def test_a_single_missing_device_is_spoken_of_in_the_singular(tmp_path: Path) -> None:
    stages = load(tmp_path, {"stages": [stage(runtime={"devices": 3})]})
    message = str(refusal(stages, Machine(1, (0,))))
    assert "asks for device 3; this machine has 1 CUDA device, number 0;" in message


def test_cuda_asked_for_where_there_is_none_is_refused(tmp_path: Path) -> None:
    stages = load(tmp_path, {"stages": [stage(engine_args={"device": "cuda"})]})
    error = refusal(stages, TWO_CORES)
    assert error.param == "stages[0].engine_args.device"
    assert "this machine has no CUDA device; write device: cpu to use its 2 CPU cores" in str(error)


def test_the_bundled_stage_runs_on_cores_of_a_machine_with_one_gpu() -> None:
    stages = load_stages(
        REPOSITORY / "configs" / "tiny_cpu.yaml", str(REPOSITORY / "models" / "tiny")
    )
    machine = Machine(cuda_count=1, cpu_cores=(0, 1, 2, 3))
    check_machine(stages, machine)
    assert machine.kind_for(stages[0]) == "cpu"
    second = plan_replicas(stages)[1]
    assert device_environment(second, machine, {})["CUDA_VISIBLE_DEVICES"] == ""
    assert core_affinity(second, machine) == {1}


@pytest.mark.parametrize("machine", [TWO_CORES, FOUR_GPUS])
def test_two_stages_may_not_have_a_device_in_common(tmp_path: Path, machine: Machine) -> None:
    document = {
        "stages": [
            stage("org/a", 0, runtime={"devices": "0,1", "num_replicas": 2}),
            stage("org/b", 1, runtime={"devices": "1"}),
        ]
    }
    error = refusal(load(tmp_path, document), machine)
    noun = "CPU core" if machine is TWO_CORES else "CUDA device"
    assert error.param == "stages[1].runtime.devices"
    assert f"device 1 ({noun} 1) is already used by stages[0]; give each stage its" in str(error)


def test_a_core_and_a_gpu_of_the_same_number_are_two_devices(tmp_path: Path) -> None:
    document = {"stages": [stage("org/a", 0), stage("org/b", 1, engine_args={"device": "cpu"})]}
    check_machine(load(tmp_path, document), FOUR_GPUS)


def test_every_stage_that_does_not_fit_is_named(tmp_path: Path) -> None:
    document = {
        "stages": [
            stage("org/a", 0, runtime={"devices": "7"}),
            stage("org/b", 1, engine_args={"device": "cpu"}, runtime={"devices": "2"}),
        ]
    }
    error = refusal(load(tmp_path, document), FOUR_GPUS)
    assert [detail.param for detail in error.details] == [
        "stages[0].runtime.devices",
        "stages[1].runtime.devices",
    ]


@pytest.mark.parametrize(
    ("environ", "visible"),
    [
        ({}, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "7,6,5,4"}, "5,4"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d"}, "GPU-c,GPU-d"),
    ],
)
def test_device_numbers_count_along_the_visible_devices(
    tmp_path: Path, environ: dict[str, str], visible: str
) -> None:
    stages = load(
        tmp_path,
        {
            "stages": [
                stage(
                    runtime={"devices": "0,1,2,3", "num_replicas": 2},
                    engine_args={"parallel_config": {"world_size": 2}},
                )
            ]
        },
    )
    machine = detect_machine(
        environ, gpu_files(tmp_path, "nvidia0", "nvidia1", "nvidia2", "nvidia3")
    )
    second = plan_replicas(stages)[1]
    assert device_environment(second, machine, environ) == {
        "CUDA_VISIBLE_DEVICES": visible,
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert core_affinity(second, machine) == frozenset()


def test_a_replica_on_cores_gets_as_many_threads_and_sees_no_gpu(tmp_path: Path) -> None:
    document = {
        "stages": [
            stage(runtime={"devices": "1,0"}, engine_args={"parallel_config": {"world_size": 2}})
        ]
    }
    plan = plan_replicas(load(tmp_path, document))[0]
    assert device_environment(plan, TWO_CORES, {}) == {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert core_affinity(plan, TWO_CORES) == {4, 6}


def test_variables_of_the_stage_win_over_the_thread_count(tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": 7, "HF_HUB_OFFLINE": "1"}
    plan = plan_replicas(load(tmp_path, {"stages": [stage(runtime={"env": env})]}))[0]
    given = device_environment(plan, TWO_CORES, {})
    assert given["OMP_NUM_THREADS"] == "7"
    assert given["MKL_NUM_THREADS"] == "1"
    assert given["HF_HUB_OFFLINE"] == "1"
    configured = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    on_gpu = device_environment(plan, FOUR_GPUS, configured)
    assert on_gpu == {"OMP_NUM_THREADS": "7", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "0"}


def test_a_process_is_pinned_to_the_cores_of_its_replica(tmp_path: Path) -> None:
    load(tmp_path, {"stages": [stage(engine_args={"device": "cpu"})]})
    script = (
        "import os\n"
        "from configs.devices import detect_machine, pin_to_cores\n"
        "from configs.stages import load_stages, plan_replicas\n"
        f"plan = plan_replicas(load_stages({str(tmp_path / 'stages.yaml')!r}))[0]\n"
        "pin_to_cores(plan, detect_machine(os.environ))\n"
        "print(*os.sched_getaffinity(0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(min(os.sched_getaffinity(0)))]
