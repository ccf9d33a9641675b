"""Which devices this machine has, and what a replica's process must be told to use its own only.

It reads the environment, device files and the affinity of the process. All of it must be known
before torch is first imported.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from configs.errors import ConfigurationError, FieldError
from configs.fields import counted
from configs.stage_config import ReplicaPlan, StageConfig

DeviceKind = Literal["cuda", "cpu"]

_NVIDIA_FILE: Final = re.compile(r"nvidia\d+\Z")
# Torch reads the first of these that is set (2.13, CUDAAllocatorConfig.h).
_ALLOCATOR: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NOUNS: Final[Mapping[DeviceKind, str]] = {"cuda": "CUDA device", "cpu": "CPU core"}


@dataclass(frozen=True)
class Machine:
    """The devices this process may use, numbered from 0.

    Attributes:
        cuda_count: GPUs.
        cpu_cores: The operating system's number of the core of each device; ours is the place in
            the tuple.
    """

    cuda_count: int
    cpu_cores: tuple[int, ...]

    @property
    def kind(self) -> DeviceKind:
        """What device numbers mean where a stage leaves it open: CUDA devices if there are any."""
        return "cuda" if self.cuda_count else "cpu"

    @property
    def count(self) -> int:
        """Devices of that kind."""
        return self.count_of(self.kind)

    def count_of(self, kind: DeviceKind) -> int:
        """Devices of the given kind."""
        return self.cuda_count if kind == "cuda" else len(self.cpu_cores)

    def kind_for(self, stage: StageConfig) -> DeviceKind:
        """What the device numbers of this stage mean on this machine."""
        device = stage.engine_args.device
        return self.kind if device == "auto" else device


def detect_machine(
    environ: Mapping[str, str], device_folder: Path = Path("/dev"), cpu_devices: int = 0
) -> Machine:
    """Find the devices that this process may use.

    CUDA devices are those of CUDA_VISIBLE_DEVICES if it is set, else one for each
    /dev/nvidia<number>. Cores are those this process may run on; with `cpu_devices` as many devices
    are spread over them, several to a core where there are more. Ask before the environment or
    the affinity of a replica is applied to the process, since both narrow the answer.

    Raises:
        ConfigurationError: CUDA_VISIBLE_DEVICES names a device twice.
    """
    listed = _listed_gpus(environ)
    count = _gpu_files(device_folder) if listed is None else len(listed)
    cores = _cpu_cores()
    devices = cpu_devices or len(cores)
    return Machine(count, tuple(cores[device % len(cores)] for device in range(devices)))


def check_machine(stages: Sequence[StageConfig], machine: Machine) -> None:
    """Refuse stages that this machine cannot hold.

    Raises:
        ConfigurationError: A stage needs CUDA where there is none, names a device that the machine
            does not have, or one that another stage has; all such places are named.
    """
    details: list[FieldError] = []
    taken: dict[tuple[DeviceKind, int], str] = {}
    for index, stage in enumerate(stages):
        kind = machine.kind_for(stage)
        faults = _absent(stage, kind, machine) or _shared(stage, kind, taken)
        details.extend(
            FieldError(stage.paths.get(path, f"stages[{index}].{path}"), fault)
            for path, fault in faults
        )
        for device in stage.runtime.devices:
            taken.setdefault((kind, device), stage.paths.get("", f"stages[{index}]"))
    if details:
        raise ConfigurationError.from_details(details, "this machine does not fit the stage file")


def device_environment(
    plan: ReplicaPlan, machine: Machine, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that a replica's process must have before torch is imported.

    They are those of `runtime.env`, and CUDA_VISIBLE_DEVICES, empty for a replica on CPU cores.
    Such a one also gets as many threads as it has cores, unless `runtime.env` says otherwise. One
    on CUDA devices gets memory in segments that grow, since requests of many sizes leave holes
    between others, unless the allocator of torch is configured there or in `environ`.

    Args:
        plan: The replica.
        machine: What `detect_machine` found in the same `environ`.
        environ: Where CUDA_VISIBLE_DEVICES is set, device numbers count along its entries.
    """
    if machine.kind_for(plan.stage) == "cuda":
        listed = _listed_gpus(environ)
        entries = plan.devices if listed is None else [listed[device] for device in plan.devices]
        env = plan.stage.runtime.env
        own = any(name in env or name in environ for name in _ALLOCATOR)
        return {
            **({} if own else {_ALLOCATOR[-1]: "expandable_segments:True"}),
            **env,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, entries)),
        }
    threads = str(len(plan.devices))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **plan.stage.runtime.env,
        "CUDA_VISIBLE_DEVICES": "",
    }


def core_affinity(plan: ReplicaPlan, machine: Machine) -> frozenset[int]:
    """Return the operating system's numbers of the cores a replica is to be pinned to.

    Empty for a replica on CUDA devices, which is not pinned.
    """
    if machine.kind_for(plan.stage) == "cuda":
        return frozenset()
    return frozenset(machine.cpu_cores[device] for device in plan.devices)


def pin_to_cores(plan: ReplicaPlan, machine: Machine) -> None:
    """Let this process run on the replica's cores only; a replica on CUDA devices runs anywhere."""
    cores = core_affinity(plan, machine)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _listed_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The entries of CUDA_VISIBLE_DEVICES, numbers or UUIDs; None when it is not set."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    entries: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        # As CUDA itself reads the list: it ends at the first entry that is no device.
        if not entry or entry.startswith("-"):
            break
        if entry in entries:
            raise ConfigurationError(
                f"CUDA_VISIBLE_DEVICES: {listed!r} names device {entry} twice; "
                "name each device once",
                param="CUDA_VISIBLE_DEVICES",
            )
        entries.append(entry)
    return tuple(entries)


def _gpu_files(device_folder: Path) -> int:
    return sum(1 for entry in device_folder.glob("nvidia*") if _NVIDIA_FILE.match(entry.name))


def _cpu_cores() -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # only Linux tells which cores a process may use
        return tuple(range(os.cpu_count() or 1))


def _absent(stage: StageConfig, kind: DeviceKind, machine: Machine) -> list[tuple[str, str]]:
    """Devices of the stage that the machine does not have: (path below the stage, fault)."""
    count = machine.count_of(kind)
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
