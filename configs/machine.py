"""What this machine has: CPU cores and NVIDIA GPUs, found without torch.

GPUs are found by the files of their driver and, where those do not tell, by nvidia-smi. A test puts
a folder with such files in the place of `/`.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from configs.errors import ConfigurationError
from configs.fields import counted
from configs.stage_config import StageConfig

DeviceKind = Literal["cuda", "cpu"]

ROOT: Final = Path("/")
_NVIDIA_FILE: Final = re.compile(r"nvidia\d+\Z")
_CPU_WORD: Final = "to use CPU cores instead, write device: cpu"

# The oldest Linux driver of each major version of CUDA (CUDA Toolkit Release Notes, minor version
# compatibility): https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html
_OLDEST_DRIVER: Final = {"11": 450, "12": 525, "13": 580}


@dataclass(frozen=True)
class Gpu:
    """A GPU as CUDA_VISIBLE_DEVICES names it.

    Attributes:
        entry: Its number in the order of the PCI bus, or its UUID.
        cores: The operating system's numbers of the cores on its side of the machine (its NUMA
            node) that this process may use; empty where that is not known.
        split: Whether it is cut into MIG instances, or is one.
    """

    entry: str
    cores: tuple[int, ...] = ()
    split: bool = False

    @property
    def is_instance(self) -> bool:
        """Whether it is named as a MIG instance."""
        return self.entry.startswith("MIG-")


@dataclass(frozen=True)
class Machine:
    """The devices this process may use, numbered from 0.

    Attributes:
        cuda_count: GPUs.
        cpu_cores: The operating system's number of the core of each device; ours is the place in
            the tuple.
        gpus: What is known of each GPU; empty where nothing is.
        gpu_fault: Why torch cannot use the GPUs that this host has, and what to do.
    """

    cuda_count: int
    cpu_cores: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()
    gpu_fault: str | None = None

    @property
    def kind(self) -> DeviceKind:
        """What device numbers mean where a stage leaves it open: GPUs if the host has any."""
        return "cuda" if self.cuda_count or self.gpu_fault else "cpu"

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


def detect_machine(environ: Mapping[str, str], root: Path = ROOT, cpu_devices: int = 0) -> Machine:
    """Find the devices that this process may use.

    CUDA devices are those of CUDA_VISIBLE_DEVICES if it is set, else one for each
    /dev/nvidia<number>, else (WSL2, which has /dev/dxg alone) those that nvidia-smi lists. Cores
    are those this process may run on; with `cpu_devices` as many devices are spread over them,
    several to a core where there are more. Ask before the environment or the affinity of a replica
    is applied to the process, since both narrow the answer.

    Raises:
        ConfigurationError: CUDA_VISIBLE_DEVICES names a device twice.
    """
    cores = _cpu_cores()
    devices = cpu_devices or len(cores)
    gpus = _gpus(environ, root, cores)
    return Machine(
        len(gpus),
        tuple(cores[device % len(cores)] for device in range(devices)),
        gpus,
        _fault(environ, root, len(gpus)),
    )


def listed_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES, numbers or UUIDs; None when it is not set.

    Raises:
        ConfigurationError: It names a device twice.
    """
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


def nvidia_smi(*arguments: str, root: Path = ROOT) -> list[str]:
    """Return the lines that nvidia-smi prints; none where it is not there or fails.

    It takes a second or two where the driver is not kept loaded.
    """
    # The last is where Windows puts it under WSL2.
    folders = [str(root / folder) for folder in ("usr/bin", "usr/local/bin", "usr/lib/wsl/lib")]
    inherited = os.environ.get("PATH", "").split(os.pathsep) if root == ROOT else []
    program = shutil.which("nvidia-smi", path=os.pathsep.join([*inherited, *folders]))
    if program is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603 - a program of the system, and words of ours
            [program, *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def gpu_memory_bytes(machine: Machine, root: Path = ROOT) -> int | None:
    """Return the memory of the smallest of the GPUs; None where that is not known."""
    entries = ",".join(gpu.entry for gpu in machine.gpus if not gpu.split)
    if not entries:
        return None
    query = ("--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={entries}")
    sizes = [line.strip() for line in nvidia_smi(*query, root=root)]
    if not sizes or not all(size.isdigit() for size in sizes):
        return None
    return min(int(size) for size in sizes) * 2**20


def why_no_cuda(torch_version: str, torch_cuda: str | None, root: Path = ROOT) -> str:
    """Return why torch sees no GPU, as far as the host's files tell, and what to do.

    Args:
        torch_version: Such as `2.13.0+cu130`.
        torch_cuda: Version of CUDA it was built for; None for a build without.
        root: Where `/dev` and `/proc` are.
    """
    if torch_cuda is None:
        return (
            f"torch {torch_version} is a build for CPUs alone; install one for CUDA: "
            f"pip install --force-reinstall torch=={torch_version.partition('+')[0]} with the "
            "--index-url that PyTorch's installation page (pytorch.org/get-started) names"
        )
    driver = _driver(root)
    oldest = _OLDEST_DRIVER.get(torch_cuda.partition(".")[0])
    if driver and oldest and int(driver.partition(".")[0]) < oldest:
        return (
            f"the NVIDIA driver is {driver}, and torch {torch_version} is built for CUDA "
            f"{torch_cuda}, which needs driver {oldest} or newer; update the driver, or install a "
            "build of torch for an older CUDA"
        )
    return (
        f"torch {torch_version} (CUDA {torch_cuda}) sees no GPU; compare with nvidia-smi, and see "
        "whether CUDA_VISIBLE_DEVICES names GPUs that are there"
    )


def cuda_of_torch(package: Path | None) -> tuple[str, str | None] | None:
    """Return the version of the torch in this folder, and the CUDA it was built for.

    Read from its version.py, since importing torch takes seconds. None where that does not tell.
    """
    try:
        text = (package / "version.py").read_text(encoding="utf-8") if package else ""
    except OSError:
        return None
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= (?:'([^']+)'|None)$", text, re.MULTILINE)
    return (version[1], cuda[1]) if version and cuda else None


def _gpus(environ: Mapping[str, str], root: Path, cores: Sequence[int]) -> tuple[Gpu, ...]:
    listed = listed_gpus(environ)
    if listed is None:
        listed = tuple(map(str, range(_gpu_count(root))))
    known = _by_entry(root, cores)
    # Numbers count in the order of the bus unless a user has chosen otherwise.
    numbered = environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID"
    return tuple(
        Gpu(entry, split=True)
        if entry.startswith("MIG-")
        else (known.get(entry) if numbered or not entry.isdigit() else None) or Gpu(entry)
        for entry in listed
    )


def _gpu_count(root: Path) -> int:
    files = sum(1 for entry in root.glob("dev/nvidia*") if _NVIDIA_FILE.match(entry.name))
    if files or not (root / "dev/dxg").exists():
        return files
    listed = sum(line.startswith("GPU ") for line in nvidia_smi("-L", root=root))
    return listed or int((root / "usr/lib/wsl/lib/libcuda.so.1").exists())


def _by_entry(root: Path, cores: Sequence[int]) -> dict[str, Gpu]:
    """What the driver's files say of each GPU, by its number and its UUID.

    A container may have device files of some GPUs only, while /proc shows all of the host.
    """
    found: dict[str, Gpu] = {}
    number = 0
    for folder in sorted(root.glob("proc/driver/nvidia/gpus/*")):
        lines = _text(folder / "information").splitlines()
        pairs = (line.partition(":") for line in lines)
        said = {name.strip(): value.strip() for name, _, value in pairs}
        minor = said.get("Device Minor", "")
        if not (root / f"dev/nvidia{minor}").exists():
            continue
        near = _core_list(_text(root / "sys/bus/pci/devices" / folder.name / "local_cpulist"))
        split = any(root.glob(f"proc/driver/nvidia/capabilities/gpu{minor}/mig/gi*"))
        own = tuple(core for core in cores if core in near)
        for entry in filter(None, (str(number), said.get("GPU UUID"))):
            found[entry] = Gpu(entry, own, split)
        number += 1
    return found


def _fault(environ: Mapping[str, str], root: Path, count: int) -> str | None:
    """Why torch cannot use GPUs of this host; None where it can, where there are none, or unknown.

    A CUDA_VISIBLE_DEVICES that is empty says that none is wanted.
    """
    hosts = sum(1 for _ in root.glob("proc/driver/nvidia/gpus/*"))
    if count == 0 and hosts and listed_gpus(environ) is None:
        have = "has a GPU" if hosts == 1 else f"has {counted(hosts, 'GPU')}"
        return (
            f"this host {have} (/proc/driver/nvidia), and /dev has none of its files: in a "
            "container, install the NVIDIA container toolkit on the host and start with --gpus "
            "all (docker compose: the deploy block of docker-compose.yml); on a host, run "
            f"nvidia-smi once; {_CPU_WORD}"
        )
    spec = find_spec("torch") if count else None
    build = cuda_of_torch(Path(spec.origin).parent) if spec and spec.origin else None
    if build and build[1] is None:
        return f"{why_no_cuda(*build, root)}; {_CPU_WORD}"
    return None


def _driver(root: Path) -> str | None:
    """The version of the driver in the kernel, such as `535.104.05`."""
    text = _text(root / "proc/driver/nvidia/version")
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def _core_list(text: str) -> frozenset[int]:
    """The cores of a list as Linux writes it, such as `0-15,32-47`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(
        core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _cpu_cores() -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # only Linux tells which cores a process may use
        return tuple(range(os.cpu_count() or 1))
