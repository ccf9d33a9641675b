"""What memory a model's weights need, told by the headers of its files before any is read.

Of weights alone: what a run needs beside them is known only once it runs, so a model that is let
through may still be too large. The numbers that classes of diffusers and transformers keep in
float32 whatever is asked for are counted as the rest of their part is.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Final

import psutil
import torch

from configs.errors import ModelLoadFailed
from configs.stage_config import EngineArgs, PipelineSettings, Quantization
from workers.devices.weights import DENOISERS, weight_dtype
from workers.engine.loading.saved_parts import SavedPart

logger = logging.getLogger(__name__)

_GB: Final = 10**9
# Bytes of a number in the types of safetensors; of those that are not here, one.
_SAVED_BYTES: Final = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_FLOATS: Final = ("F", "BF")
_NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Bytes of a number with its share of the scales.
_QUANTIZED_BYTES: Final = {
    "int8": 1.0,
    "fp8": 1.0,
    "bitsandbytes_8bit": 1.0,
    "bitsandbytes_4bit": 0.56,
}
# Above this share of a device little is left for runs.
_TIGHT: Final = 0.85
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class PartSize:
    """Bytes of one part as it is held.

    Attributes:
        total: All of them.
        own: Those of them that are not the file itself, mapped, on the host; weights in the type in
            which they are saved are, and all replicas of a host share them.
    """

    total: int
    own: int


@dataclass(frozen=True)
class Need:
    """Bytes that weights need.

    Attributes:
        parts: Of each part as it is held, wherever that is.
        host: Of the host's memory, for this replica, its ranks included.
        host_own: Those of them that no other replica shares.
        devices: Of each GPU; empty on a CPU. With `balanced` those of all together are the first.
        whole: Of the largest piece that one GPU must hold.
    """

    parts: Mapping[str, PartSize]
    host: int
    host_own: int
    devices: tuple[int, ...] = ()
    whole: int = 0


@dataclass(frozen=True)
class Free:
    """Bytes that are free: of the host's memory, and of each GPU of this replica."""

    host: int
    devices: tuple[int, ...] = ()


def estimate(args: EngineArgs, parts: Mapping[str, SavedPart], device: str) -> Need:
    """Return what the weights need on `cpu` or `cuda`, with the settings of the stage."""
    sizes = {name: _size(args, part, device) for name, part in parts.items()}
    sizes |= _given(args, sizes)
    total = sum(size.total for size in sizes.values())
    parallel, settings = args.parallel_config, args.pipeline
    stepped = sum(sizes[name].total for name in DENOISERS if name in sizes)
    if device == "cpu":
        # Copies are the same weights in memory, ranks are processes that read them themselves.
        own = sum(size.own for size in sizes.values())
        if parallel.context_degree > 1:
            ranks = sum(sizes[name].own for name in DENOISERS if name in sizes)
            own += (parallel.world_size - 1) * ranks
        shared = sum(size.total - size.own for size in sizes.values())
        return Need(sizes, shared + own, own)
    largest = max((size.total for size in sizes.values()), default=0)
    if settings.enable_cpu_offload:
        return Need(sizes, total, total, (largest,), largest)
    if settings.enable_layerwise_offload:
        kept = {n for n in sizes if n in DENOISERS or n.startswith("text_encoder")}
        host = sum(sizes[name].total for name in kept)
        return Need(sizes, host, host, (total - host,), 0)
    if parallel.device_map is not None:
        return Need(sizes, 0, 0, (total,), largest)
    return Need(sizes, 0, 0, (total, *(stepped for _ in range(1, parallel.world_size))), total)


def check_memory(
    args: EngineArgs, parts: Mapping[str, SavedPart], need: Need, free: Free, whole: Free
) -> None:
    """Refuse weights that do not fit into what is free, with the numbers and the ways out.

    `whole` is what the host and the GPUs have when nothing is taken of it.

    Raises:
        ModelLoadFailed: They do not; lasting, where they would not fit into the whole either.
    """
    short = _short(args, need, free)
    if short is None:
        _tell_what_is_left(args, need, free)
        return
    listed = sorted(need.parts.items(), key=lambda each: -each[1].total)
    shown = ", ".join(f"{name} {in_gb(size.total)}" for name, size in listed)
    ways = "; or ".join(_ways(args, parts, free)) or "use a smaller model or more memory"
    lasting = _short(args, need, whole) is not None
    raise ModelLoadFailed(f"{args.model}: {short} (the weights: {shown}); {ways}", lasting=lasting)


def _short(args: EngineArgs, need: Need, free: Free) -> str | None:
    """What is too little; None where nothing is."""
    if args.parallel_config.device_map is not None and free.devices:
        if need.devices[0] > sum(free.devices):
            return (
                f"the weights need {in_gb(need.devices[0])} of GPU memory, and the GPUs of the"
                f" replica have {in_gb(sum(free.devices))} together"
            )
        if need.whole > max(free.devices):
            return (
                f"the largest part needs {in_gb(need.whole)} of one GPU, and none has more than"
                f" {in_gb(max(free.devices))} free"
            )
    else:
        for index, (needed, has) in enumerate(zip(need.devices, free.devices, strict=False)):
            if needed > has:
                return (
                    f"the weights need {in_gb(needed)} of the memory of GPU {index} of the"
                    f" replica, which has {in_gb(has)} free"
                )
    if need.host > free.host:
        return (
            f"the weights need {in_gb(need.host)} of the host's memory, which has"
            f" {in_gb(free.host)} free"
        )
    return None


def _ways(args: EngineArgs, parts: Mapping[str, SavedPart], free: Free) -> list[str]:
    """Settings with which it would fit, each with what it would need then."""
    device, ways = "cuda" if free.devices else "cpu", list[str]()
    for what, changed in _changes(args, device):
        need = estimate(changed, parts, device)
        if _short(changed, need, free) is None:
            needed = need.devices[0] if need.devices else need.host
            also = f" and {in_gb(need.host)} of the host's" if need.devices and need.host else ""
            ways.append(f"set engine_args.{what}, with which it is {in_gb(needed)}{also}")
    if device == "cpu":
        ways.append("serve it by fewer replicas (runtime.num_replicas)")
    elif args.parallel_config.world_size == 1:
        plain = estimate(replace(args, pipeline=_without_offload(args.pipeline)), parts, device)
        largest = max(size.total for size in plain.parts.values())
        if largest <= free.devices[0]:
            count = max(2, ceil(plain.devices[0] / free.devices[0]))
            ways.append(
                f"give each replica {count} such GPUs with parallel_config.device_map: balanced"
            )
    return ways


def _changes(args: EngineArgs, device: str) -> Iterator[tuple[str, EngineArgs]]:
    """Settings that may need less memory, as they are written, and the arguments with them."""
    settings = args.pipeline
    if settings.quantization is None:
        for method in ("int8", "bitsandbytes_4bit") if device == "cuda" else ("int8",):
            changed = replace(settings, quantization=Quantization(method))
            yield f"quantization: {method}", replace(args, pipeline=changed)
    if device == "cpu":
        yield "dtype: bfloat16", replace(args, dtype="bfloat16")
    elif args.parallel_config.world_size == 1:
        plain = _without_offload(settings)
        parts, layers = (
            replace(plain, enable_cpu_offload=True),
            replace(plain, enable_layerwise_offload=True),
        )
        yield "enable_cpu_offload: true", replace(args, pipeline=parts)
        yield "enable_layerwise_offload: true", replace(args, pipeline=layers)


def _without_offload(settings: PipelineSettings) -> PipelineSettings:
    return replace(settings, enable_cpu_offload=False, enable_layerwise_offload=False)


def _tell_what_is_left(args: EngineArgs, need: Need, free: Free) -> None:
    if need.devices and free.devices:
        needed, has = need.devices[0], free.devices[0]
        if args.parallel_config.device_map is not None:
            has = sum(free.devices)
        logger.info("%s: the weights take %s of %s", args.model, in_gb(needed), in_gb(has))
        if needed > _TIGHT * has:
            logger.warning(
                "%s: the weights leave %s for runs; where that is too little, vae_use_tiling and"
                " vae_use_slicing make the autoencoder need less, quantization and offloading"
                " leave more",
                args.model,
                in_gb(has - needed),
            )
    else:
        logger.info(
            "%s: the weights take %s of the host's memory, of which %s is free; %s of it is the"
            " files themselves, which replicas share",
            args.model,
            in_gb(need.host),
            in_gb(free.host),
            in_gb(need.host - need.host_own),
        )


def _given(args: EngineArgs, sizes: Mapping[str, PartSize]) -> dict[str, PartSize]:
    """The part that comes from a file of its own; the model's folder need not have its weights."""
    wanted = args.pipeline.quantization
    if wanted is None or wanted.gguf_file is None:
        return {}
    names = wanted.components or tuple(name for name in DENOISERS if name in sizes)
    file = Path(wanted.gguf_file)
    size = file.stat().st_size if file.is_file() else 0  # a missing one is refused where it is read
    return {name: PartSize(size, size) for name in names or DENOISERS[1:2]}


def _size(args: EngineArgs, part: SavedPart, device: str) -> PartSize:
    """Bytes of a part as it is held."""
    wanted = args.pipeline.quantization
    quantized = wanted is not None and part.name in (wanted.components or DENOISERS)
    dtype = weight_dtype(args, device, part.name)
    total = own = 0.0
    for kind, count in part.numbers.items():
        if not kind.startswith(_FLOATS):
            total += count * _SAVED_BYTES.get(kind, 1)
        elif wanted is not None and quantized:
            # That of GGUF is the size of its file.
            total += count * _QUANTIZED_BYTES.get(wanted.method, 0)
            own += count * _QUANTIZED_BYTES.get(wanted.method, 0)
        else:
            total += count * dtype.itemsize
            own += 0 if _NAMES.get(dtype) == kind else count * dtype.itemsize
    return PartSize(int(total) + part.opaque_bytes, int(own) + part.opaque_bytes)


def free_memory(device: str) -> tuple[Free, Free]:
    """Return what is free on this host and on each GPU of this process, and what they have whole.

    Of the first GPU alone it is asked what others hold: asking makes a context, which takes
    hundreds of megabytes.
    """
    host, whole = free_host(), psutil.virtual_memory().total
    if device == "cpu":
        return Free(host), Free(whole)
    first, total = torch.cuda.mem_get_info(0)
    others = range(1, torch.cuda.device_count())
    totals = tuple(torch.cuda.get_device_properties(index).total_memory for index in others)
    return Free(host, (first, *totals)), Free(whole, (total, *totals))


def free_host() -> int:
    """Return the bytes that this process may still take of the host's memory."""
    available: int = psutil.virtual_memory().available
    return min(available, _free_of_group())


def _free_of_group(group: Path = _CGROUP) -> int:
    """Bytes that a container may still take (cgroup v2); what its files hold is given back."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        fields = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = sum(
            int(count) for name, count in fields if name in {"active_file", "inactive_file"}
        )
    except (OSError, ValueError):  # no limit ("max"), or no such group
        return 2**63
    return max(0, limit - used + files)


def in_gb(size: int) -> str:
    """Return a size as people say it: `14.2 GB`, of 10^9 bytes."""
    return f"{size / _GB:.1f} GB" if size >= _GB / 10 else f"{size / 10**6:.1f} MB"
