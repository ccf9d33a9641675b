"""Devices: what a machine is found to have, what it refuses, and what a replica's process gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.devices import (
    check_machine,
    core_affinity,
    device_environment,
    with_device,
)
from configs.errors import ConfigurationError
from configs.machine import Machine, cuda_of_torch, detect_machine, gpu_memory_bytes, why_no_cuda
from configs.stage_config import StageConfig
from configs.stages import load_stages, plan_replicas
from tests.unit.stage_files import REPOSITORY, load, stage

TWO_CORES = Machine(cuda_count=0, cpu_cores=(4, 6))
FOUR_GPUS = Machine(cuda_count=4, cpu_cores=(0, 1))
EIGHT_GPUS = Machine(cuda_count=8, cpu_cores=(0, 1))
EIGHT_FILE = REPOSITORY / "configs" / "8x80gb" / "qwen_image.yaml"


def refusal(stages: tuple[StageConfig, ...], machine: Machine) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as refused:
        check_machine(stages, machine)
    return refused.value


def gpu_files(root: Path, *names: str) -> Path:
    (root / "dev").mkdir(exist_ok=True)
    for name in names:
        (root / "dev" / name).touch()
    return root


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
        "from configs.machine import detect_machine\n"
        "detect_machine(os.environ)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False).returncode == 0
    )


def test_devices_the_machine_has_are_accepted(tmp_path: Path) -> None:
    check_machine(load_stages(EIGHT_FILE), EIGHT_GPUS)
    check_machine(
        load(tmp_path, {"stages": [stage(runtime={"devices": [1, 0], "num_replicas": 2})]}),
        TWO_CORES,
    )


def test_cores_the_machine_does_not_have_are_refused() -> None:
    stages = load_stages(EIGHT_FILE)
    assert str(refusal(stages, TWO_CORES)) == (
        "this machine does not fit the stage file: stages[0].runtime.devices: "
        "asks for devices 2, 3, 4, 5, 6, 7; this machine has 2 CPU cores, 0 to 1, and no CUDA "
        "device; use these, or lower num_replicas"
    )


def test_gpus_the_machine_does_not_have_are_refused() -> None:
    stages = load_stages(EIGHT_FILE)
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
    given = device_environment(second, machine, environ)
    assert given["CUDA_VISIBLE_DEVICES"] == visible
    assert given["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert given["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
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
    on_gpu = device_environment(plan, FOUR_GPUS, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"})
    assert on_gpu == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": "7",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    chosen = device_environment(plan, FOUR_GPUS, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert chosen["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_process_is_pinned_to_the_cores_of_its_replica(tmp_path: Path) -> None:
    load(tmp_path, {"stages": [stage(engine_args={"device": "cpu"})]})
    script = (
        "import os\nfrom configs.devices import pin_to_cores\n"
        "from configs.machine import detect_machine\n"
        "from configs.stages import load_stages, plan_replicas\n"
        f"plan = plan_replicas(load_stages({str(tmp_path / 'stages.yaml')!r}))[0]\n"
        "pin_to_cores(plan, detect_machine(os.environ))\nprint(*os.sched_getaffinity(0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(min(os.sched_getaffinity(0)))]


# A host with GPUs, as the files of the driver and of the kernel show it.


def gpu_host(root: Path, *cores: str, files: bool = True) -> Path:
    """A host with a GPU for each list of cores, which are those on its side of the machine."""
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n"
    for number, near in enumerate(cores):
        bus = f"0000:{number + 1}b:00.0"
        gpu = root / "proc/driver/nvidia/gpus" / bus
        pci = root / "sys/bus/pci/devices" / bus
        gpu.mkdir(parents=True)
        pci.mkdir(parents=True)
        # Minor numbers need not follow the bus.
        minor = len(cores) - 1 - number
        (gpu / "information").write_text(f"GPU UUID: \t GPU-{number}\nDevice Minor: \t {minor}\n")
        (pci / "local_cpulist").write_text(near)
    (root / "proc/driver/nvidia/version").write_text(driver)
    return gpu_files(root, *(f"nvidia{each}" for each in range(len(cores)))) if files else root


def nvidia_smi(root: Path, script: str) -> None:
    program = root / "usr/lib/wsl/lib/nvidia-smi"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_replicas_are_pinned_to_the_cores_near_their_gpus_and_share_them(tmp_path: Path) -> None:
    first = min(os.sched_getaffinity(0))
    # Two GPUs beside a core that this process may use, two beside one that it may not.
    host = gpu_host(tmp_path, f"{first}", f"{first}", "9000-9003", "9000-9003")
    document = {"stages": [stage(runtime={"devices": [0, 1, 2], "num_replicas": 3})]}
    near, _, far = plan_replicas(load(tmp_path, document))
    machine = detect_machine({}, host)
    assert [gpu.cores for gpu in machine.gpus] == [(first,), (first,), (), ()]
    assert core_affinity(near, machine) == {first}
    assert core_affinity(far, machine) == frozenset()
    assert device_environment(near, machine, {})["OMP_NUM_THREADS"] == "1"
    by_uuid = detect_machine({"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-1"}, host)
    assert [gpu.cores for gpu in by_uuid.gpus] == [(), (first,)]
    # Where a user numbers GPUs otherwise, nothing is known of a number.
    otherwise = detect_machine({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, host)
    assert [gpu.cores for gpu in otherwise.gpus] == [()] * 4


def test_threads_are_the_share_of_each_gpu_in_the_cores(tmp_path: Path) -> None:
    document = {"stages": [stage(engine_args={"parallel_config": {"world_size": 2}})]}
    (plan,) = plan_replicas(load(tmp_path, document))
    machine = Machine(cuda_count=4, cpu_cores=tuple(range(64)))
    assert device_environment(plan, machine, {})["OMP_NUM_THREADS"] == "16"


def test_weights_that_are_pinned_on_the_host_are_not_rounded_up(tmp_path: Path) -> None:
    document = {"stages": [stage(engine_args={"enable_layerwise_offload": True})]}
    (plan,) = plan_replicas(load(tmp_path, document))
    assert device_environment(plan, FOUR_GPUS, {})["PYTORCH_ALLOC_CONF"] == (
        "expandable_segments:True,pinned_max_round_threshold_mb:1"
    )


def test_a_container_that_got_no_gpu_of_its_host_is_refused(tmp_path: Path) -> None:
    machine = detect_machine({}, gpu_host(tmp_path, "0-3", "0-3", files=False))
    assert (machine.cuda_count, machine.kind) == (0, "cuda")
    error = refusal(load(tmp_path, {"stages": [stage()]}), machine)
    assert error.param == "stages[0].engine_args.device"
    assert "'auto' is CUDA here, which cannot be used: this host has 2 GPUs" in str(error)
    assert "start with --gpus all" in str(error)
    assert "write device: cpu" in str(error)
    check_machine(load(tmp_path, {"stages": [stage(engine_args={"device": "cpu"})]}), machine)
    unwanted = detect_machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    check_machine(load(tmp_path, {"stages": [stage()]}), unwanted)


@pytest.mark.parametrize(("cuda", "built_for"), [("None", None), ("'13.0'", "13.0")])
def test_the_cuda_of_torch_is_read_without_importing_it(
    tmp_path: Path, cuda: str, built_for: str | None
) -> None:
    text = f"__version__ = '2.13.0+x'\ndebug = False\ncuda: Optional[str] = {cuda}\nhip = None\n"
    (tmp_path / "version.py").write_text(text)
    assert cuda_of_torch(tmp_path) == ("2.13.0+x", built_for)
    assert cuda_of_torch(tmp_path / "nowhere") is None
    assert cuda_of_torch(None) is None


def test_the_reason_why_torch_sees_no_gpu_is_named(tmp_path: Path) -> None:
    host = gpu_host(tmp_path, "0")
    assert "torch 2.13.0+cpu is a build for CPUs alone; install one for CUDA: pip install" in (
        why_no_cuda("2.13.0+cpu", None, host)
    )
    old = why_no_cuda("2.13.0+cu130", "13.0", host)
    assert "the NVIDIA driver is 535.104.05, and torch 2.13.0+cu130 is built for CUDA 13.0" in old
    assert "needs driver 580 or newer; update the driver" in old
    assert "compare with nvidia-smi" in why_no_cuda("2.9.0+cu126", "12.6", host)


def test_a_stage_that_torch_cannot_run_on_the_gpus_is_refused(tmp_path: Path) -> None:
    fault = why_no_cuda("2.13.0+cpu", None)
    error = refusal(load(tmp_path, {"stages": [stage()]}), Machine(1, (0,), gpu_fault=fault))
    assert "'auto' is CUDA here, which cannot be used: torch 2.13.0+cpu is a build" in str(error)


def test_a_replica_is_told_the_kind_of_its_devices(tmp_path: Path) -> None:
    (plan,) = plan_replicas(load(tmp_path, {"stages": [stage()]}))
    for machine, device in ((FOUR_GPUS, "cuda"), (TWO_CORES, "cpu")):
        assert with_device(plan, machine).stage.engine_args.device == device


def test_gpus_of_wsl_are_those_that_nvidia_smi_lists(tmp_path: Path) -> None:
    assert detect_machine({}, gpu_files(tmp_path, "dxg")).cuda_count == 0  # of another maker
    nvidia_smi(tmp_path, "exit 9")
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").touch()
    assert detect_machine({}, tmp_path).cuda_count == 1
    nvidia_smi(tmp_path, "echo 'GPU 0: RTX (UUID: GPU-a)'; echo 'GPU 1: RTX (UUID: GPU-b)'")
    assert detect_machine({}, tmp_path).cuda_count == 2


def test_the_memory_of_gpus_is_that_of_the_smallest(tmp_path: Path) -> None:
    machine = detect_machine({}, gpu_host(tmp_path, "0", "0"))
    assert gpu_memory_bytes(machine, tmp_path) is None
    nvidia_smi(tmp_path, 'test "$3" = --id=0,1 || exit 1; echo 81559; echo 24564')
    assert gpu_memory_bytes(machine, tmp_path) == 24564 * 2**20
    nvidia_smi(tmp_path, "echo '[N/A]'")
    assert gpu_memory_bytes(machine, tmp_path) is None


def test_what_mig_instances_cannot_do_is_refused(tmp_path: Path) -> None:
    host = gpu_host(tmp_path, "0", "0")
    (host / "proc/driver/nvidia/capabilities/gpu1/mig/gi1").mkdir(parents=True)
    both = load(tmp_path, {"stages": [stage(runtime={"devices": "0,1", "num_replicas": 2})]})
    by_number = Machine(2, (0,), detect_machine({}, host).gpus)
    assert [gpu.split for gpu in by_number.gpus] == [True, False]
    assert "names GPU 0 in MIG mode by number, which is the first" in str(refusal(both, by_number))
    listed = detect_machine({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, host)
    instances = Machine(2, (0,), listed.gpus)
    check_machine(both, instances)
    together = stage(engine_args={"parallel_config": {"world_size": 2}})
    error = refusal(load(tmp_path, {"stages": [together]}), instances)
    assert "names MIG instances, and a process can use one alone; set world_size to 1" in str(error)
