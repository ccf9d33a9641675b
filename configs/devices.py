"""Whether stages fit a machine, and what a replica's process must be told to use its devices only.

All of it must be known before torch is first imported.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from configs.errors import ConfigurationError, FieldError
from configs.fields import counted
from configs.machine import DeviceKind, Gpu, Machine, listed_gpus
from configs.stage_config import ReplicaPlan, StageConfig

# Torch reads the first of these that is set (2.13, CUDAAllocatorConfig.h).
_ALLOCATOR: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NOUNS: Final[Mapping[DeviceKind, str]] = {"cuda": "CUDA device", "cpu": "CPU core"}


def check_machine(stages: Sequence[StageConfig], machine: Machine) -> None:
    """Refuse stages that this machine cannot hold.

    Raises:
        ConfigurationError: A stage needs CUDA where there is none or where torch cannot use it,
            names a device that the machine does not have, one that another stage has, or MIG
            instances for more than they can do; all such places are named.
    """
    details: list[FieldError] = []
    taken: dict[tuple[DeviceKind, int], str] = {}
    for index, stage in enumerate(stages):
        kind = machine.kind_for(stage)
        faults = (
            _absent(stage, kind, machine)
            or _shared(stage, kind, taken)
            or (_instances(stage, machine.gpus) if kind == "cuda" else [])
        )
        details.extend(
            FieldError(stage.paths.get(path, f"stages[{index}].{path}"), fault)
            for path, fault in faults
        )
        for device in stage.runtime.devices:
            taken.setdefault((kind, device), stage.paths.get("", f"stages[{index}]"))
    if details:
        raise ConfigurationError.from_details(details, "this machine does not fit the stage file")


def with_device(plan: ReplicaPlan, machine: Machine) -> ReplicaPlan:
    """Return the plan with the kind of its devices in place of `auto`.

    What loads the model could only ask torch, which calls a GPU that it cannot use none.
    """
    kind = machine.kind_for(plan.stage)
    args = replace(plan.stage.engine_args, device=kind)
    return replace(plan, stage=replace(plan.stage, engine_args=args))


def device_environment(
    plan: ReplicaPlan, machine: Machine, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that a replica's process must have before torch is imported.

    They are those of `runtime.env`, and CUDA_VISIBLE_DEVICES, empty for a replica on CPU cores.
    Such a one also gets as many threads as it has cores, and one on GPUs its share of the cores
    that are near them, unless `runtime.env` says otherwise. GPUs count in the order of the PCI bus,
    as nvidia-smi shows them, unless CUDA_DEVICE_ORDER is set. Their memory comes in segments that
    grow, since requests of many sizes leave holes between others, unless the allocator of torch is
    configured in `runtime.env` or `environ`.

    Args:
        plan: The replica.
        machine: What `detect_machine` found in the same `environ`.
        environ: Where CUDA_VISIBLE_DEVICES is set, device numbers count along its entries.
    """
    on_gpus = machine.kind_for(plan.stage) == "cuda"
    threads = str(_gpu_threads(plan, machine) if on_gpus else len(plan.devices))
    given = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **plan.stage.runtime.env}
    if not on_gpus:
        return {**given, "CUDA_VISIBLE_DEVICES": ""}
    listed = listed_gpus(environ)
    entries = plan.devices if listed is None else [listed[device] for device in plan.devices]
    order = environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not any(name in given or name in environ for name in _ALLOCATOR):
        given[_ALLOCATOR[-1]] = "expandable_segments:True"
        if plan.stage.engine_args.pipeline.enable_layerwise_offload:
            # Else each weight on the host is rounded up to a power of two (2.13,
            # CachingHostAllocator.h): 18 MiB of FLUX.1 would be 32.
            given[_ALLOCATOR[-1]] += ",pinned_max_round_threshold_mb:1"
    return {
        "CUDA_DEVICE_ORDER": order,
        **given,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, entries)),
    }


def core_affinity(plan: ReplicaPlan, machine: Machine) -> frozenset[int]:
    """Return the operating system's numbers of the cores a replica is to be pinned to.

    Those of a replica on GPUs are the cores near all of them, which other replicas of the same side
    use as well. Empty where they are not known of each, so that it is not pinned.
    """
    if machine.kind_for(plan.stage) == "cpu":
        return frozenset(machine.cpu_cores[device] for device in plan.devices)
    near = [gpu.cores for gpu in _gpus_of(plan, machine)]
    return frozenset(core for cores in near for core in cores) if all(near) else frozenset()


def pin_to_cores(plan: ReplicaPlan, machine: Machine) -> None:
    """Let this process run on the replica's cores only; where none are known it runs anywhere."""
    cores = core_affinity(plan, machine)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _gpus_of(plan: ReplicaPlan, machine: Machine) -> list[Gpu]:
    # A machine may be known by the count of its GPUs alone.
    return [
        machine.gpus[device] if device < len(machine.gpus) else Gpu(str(device))
        for device in plan.devices
    ]


def _gpu_threads(plan: ReplicaPlan, machine: Machine) -> int:
    """Cores for each process of the replica: all GPUs that have the same ones share them.

    Each rank is a process of its own, and they all have one number of threads.
    """
    first = _gpus_of(plan, machine)[0]
    if not first.cores:
        return max(1, len(set(machine.cpu_cores)) // machine.cuda_count)
    sharing = sum(gpu.cores == first.cores for gpu in machine.gpus)
    return max(1, len(first.cores) // sharing)


def _instances(stage: StageConfig, gpus: Sequence[Gpu]) -> list[tuple[str, str]]:
    """What MIG instances cannot do for the stage: (path below the stage, fault).

    A process uses one instance at most, and one GPU that is named by its number is its first one:
    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/
    """
    own = [gpus[device] for device in stage.runtime.devices if device < len(gpus)]
    if stage.devices_per_replica > 1 and any(gpu.split for gpu in own):
        fault = (
            "names MIG instances, and a process can use one alone; set world_size to 1 and "
            "num_replicas to their number, or switch MIG off (nvidia-smi -mig 0)"
        )
        return [("runtime.devices", fault)]
    whole = [gpu.entry for gpu in own if gpu.split and not gpu.is_instance]
    if whole and len(own) > 1:
        noun = "GPU" if len(whole) == 1 else "GPUs"
        fault = (
            f"names {noun} {', '.join(whole)} in MIG mode by number, which is the first instance "
            "alone; set CUDA_VISIBLE_DEVICES to the instances (MIG-..., nvidia-smi -L lists them) "
            "and count along them"
        )
        return [("runtime.devices", fault)]
    return []


def _absent(stage: StageConfig, kind: DeviceKind, machine: Machine) -> list[tuple[str, str]]:
    """Devices of the stage that the machine does not have: (path below the stage, fault)."""
    count = machine.count_of(kind)
    if kind == "cuda" and machine.gpu_fault:
        said = stage.engine_args.device
        meaning = "is CUDA here, which" if said == "auto" else "is asked for and"
        return [("engine_args.device", f"'{said}' {meaning} cannot be used: {machine.gpu_fault}")]
    if kind == "cuda" and count == 0:
        cores = counted(machine.count_of("cpu"), _NOUNS["cpu"])
        fault = (
            "'cuda' is not available: this machine has no CUDA device; write device: cpu to use "
            f"its {cores}"
        )
        return [("engine_args.device", fault)]
    absent = [device for device in stage.runtime.devices if device >= count]
    if not absent:
        return []
    noun = "device" if len(absent) == 1 else "devices"
    names = ", ".join(str(device) for device in absent)
    have = f"this machine has {counted(count, _NOUNS[kind])}, {_numbers(count)}"
    if kind == "cpu" and stage.engine_args.device == "auto":
        have = f"{have}, and no CUDA device"
    fix = "use these, or lower num_replicas"
    fault = f"asks for {noun} {names}; {have}; {fix}"
    return [("runtime.devices", fault)]


def _shared(
    stage: StageConfig, kind: DeviceKind, taken: Mapping[tuple[DeviceKind, int], str]
) -> list[tuple[str, str]]:
    """Devices of the stage that an earlier stage has already: (path below the stage, fault)."""
    fault = (
        "device {number} ({noun} {number}) is already used by {owner}; "
        "give each stage its own devices"
    )
    return [
        (
            "runtime.devices",
            fault.format(number=device, noun=_NOUNS[kind], owner=taken[kind, device]),
        )
        for device in stage.runtime.devices
        if (kind, device) in taken
    ]


def _numbers(count: int) -> str:
    return "number 0" if count == 1 else f"0 to {count - 1}"
