"""The rows of denoiser calls split over devices: their threads, the splitting, and the copies."""

import copy
import functools
import logging
import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from workers.patches import method_signature, put
from workers.sharing.checks import excess
from workers.sharing.denoisers import repeat_changes
from workers.sharing.merging import Arguments, Unmergeable, choose_rows, layout, place_rows

_logger = logging.getLogger(__name__)


class DeviceThread:
    """A device with a thread of its own.

    Attributes:
        device: Where its work is done.
    """

    def __init__(self, device: torch.device, core: int | None = None) -> None:
        """Start the thread, pinned to the operating system's `core` if one is given."""
        self.device = device
        self._core = core
        self._pool = ThreadPoolExecutor(1, f"device-{device}-{core}", self._begin)
        # Here, so that what goes wrong is raised now; and see `open_device_threads`.
        self._pool.submit(bool).result()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run it in this thread, under the inference mode of the caller."""
        return self._pool.submit(self._run, torch.is_inference_mode_enabled(), function, args)

    def close(self) -> None:
        """End the thread once its work is done."""
        self._pool.shutdown(wait=False)

    def _begin(self) -> None:
        if self.device.type == "cpu":
            if self._core is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {self._core})
            # Asked first, since the first question in a thread sets it anew.
            torch.get_num_threads()
            torch.set_num_threads(1)

    def _run(self, inference: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        on_device: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "cuda":
            on_device = torch.cuda.device(self.device)
        # Both hold for one thread only.
        with torch.inference_mode(inference), on_device:
            return function(*args)


def open_device_threads(kind: str, count: int) -> list[DeviceThread]:
    """Open one for each of `count` devices: CUDA devices 0 and up, or this process' cores."""
    if kind == "cuda":
        return [DeviceThread(torch.device("cuda", index)) for index in range(count)]
    before = torch.get_num_threads()
    device_threads = [DeviceThread(torch.device("cpu"), core) for core in chunk_cores(count)]
    # torch's setting counts for its thread and for threads that begin later: those of the requests.
    torch.set_num_threads(before)
    return device_threads


def chunk_cores(count: int) -> Sequence[int | None]:
    """Return a core of this process for each of `count` devices; Nones where it has too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return cores[:count] if len(cores) >= count else [None] * count


_KINDS_KEPT = 1000


Forward = Callable[..., Any]


# Takes the arguments of a call by name, its rows, and those of each part; returns the parts'
# outputs.
RunParts = Callable[[Arguments, int, Sequence[range]], list[Any]]


def split_rows(rows: int, parts: int) -> list[range]:
    """Return the rows of each of up to `parts` parts, as even as can be, none empty."""
    parts = min(rows, parts)
    ends = [-(-rows * (index + 1) // parts) for index in range(parts)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def split_calls(module: torch.nn.Module, parts: int, whole: Forward, run_parts: RunParts) -> None:
    """Have the rows of each call of the module run as up to `parts` parts, or the call as a whole.

    The error of a part is that of the call.
    """
    split = _SplitForward(parts, whole, run_parts)
    bound = functools.wraps(type(module).forward)(split.bind(type(module)))
    put(module, "forward", bound, over=True)


class _SplitForward:
    """The forward that stands for those that run the parts."""

    def __init__(self, parts: int, whole: Forward, run_parts: RunParts) -> None:
        self._parts = parts
        self._whole = whole
        self._run_parts = run_parts
        self._right: dict[Hashable, bool] = {}

    def bind(self, module_class: Any) -> Forward:
        """Return it as a function that knows the names of the arguments."""
        signature = method_signature(module_class.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._parts < 2:
                return self._whole(*args, **kwargs)
            try:
                arguments = signature.bind(*args, **kwargs).arguments
                described = layout(arguments)
            except (TypeError, Unmergeable):
                return self._whole(*args, **kwargs)
            kind = described.signature
            if described.rows < 2 or self._right.get(kind) is False:
                return self._whole(*args, **kwargs)
            try:
                output = self._run_split(arguments, described.rows)
            except Unmergeable as error:
                self._note(kind, right=False, reason=f"{error.name} cannot be cut")
                return self._whole(*args, **kwargs)
            if kind in self._right:
                return output
            whole = self._whole(*args, **kwargs)
            worst = excess(output, whole)
            reason = f"they differ from what one gives, {worst:.3g} times as much as rounding may"
            self._note(kind, right=worst <= 1, reason=reason)
            # Where it is right the first call too has the bytes of those that follow.
            return output if worst <= 1 else whole

        return forward

    def _run_split(self, arguments: Arguments, rows: int) -> Any:
        split = split_rows(rows, self._parts)
        return place_rows(self._run_parts(arguments, rows, split), split, rows)

    def _note(self, kind: Hashable, *, right: bool, reason: str) -> None:
        if len(self._right) > _KINDS_KEPT:
            self._right.clear()
        self._right[kind] = right
        if not right:
            _logger.warning("denoiser calls of this kind are not cut over devices: %s", reason)


_copies: weakref.WeakKeyDictionary[torch.nn.Module, tuple[torch.nn.Module, ...]] = (
    weakref.WeakKeyDictionary()
)


def each_copy(module: Any) -> tuple[Any, ...]:
    """Return the denoiser itself and all its copies.

    Adapters need no care: the methods of ``workers.sharing.denoisers`` reach the copies when called
    on the denoiser, and with them a pipeline's own `load_lora_weights`, `set_adapters` and so on.
    Whoever changes a denoiser in another way changes each of these.
    """
    return (module, *_copies.get(module, ()))


def spread_rows(module: torch.nn.Module, device_threads: Sequence[DeviceThread]) -> None:
    """Put a copy of the denoiser on each device after the first, and share its calls.

    The denoiser itself stays on the first device. On a CPU all have the same weights in memory.
    Called before anything else replaces its `forward` or hooks into it.

    Raises:
        ValueError: Something has replaced the `forward` of a part already; a copy would run that of
            the original.
    """
    hooked = [name for name, part in module.named_modules() if "forward" in part.__dict__]
    if hooked:
        raise ValueError(
            f"{type(module).__name__}.{hooked[0]}: its forward is replaced by a hook (offload,"
            " layerwise casting, a cache), and several devices do not support it"
        )
    others = tuple(_copy_to(module, device_thread.device) for device_thread in device_threads[1:])
    _copies[module] = others

    def repeat(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for other in others:
            getattr(other, name)(*args, **kwargs)
            other.eval()  # the layers of a new adapter are not

    repeat_changes(module, repeat)
    forwards = [module.forward, *others]
    home = device_threads[0].device

    def run_part(forward: Callable[..., Any], part: Arguments, device: torch.device) -> Any:
        return _moved(forward(**part), device, home)

    def run_parts(arguments: Arguments, rows: int, split: Sequence[range]) -> list[Any]:
        # All before any begins: the device they are copied from would do it after its own part,
        # whose kernels stand in the same stream.
        parts = [
            _moved(choose_rows(arguments, chosen, rows), home, device_thread.device)
            for device_thread, chosen in zip(device_threads, split, strict=False)
        ]
        running = [
            device_thread.submit(run_part, forward, part, device_thread.device)
            for device_thread, forward, part in zip(device_threads, forwards, parts, strict=False)
        ]
        wait(running)
        return [each.result() for each in running]

    # Whole, it runs in the caller's thread: on a CPU that is with all cores of the chunk.
    split_calls(module, len(device_threads), module.forward, run_parts)


def _copy_to(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Copy a module onto a device, weight by weight, so that no device ever holds two of it."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        plain = type(parameter) is torch.nn.Parameter
        moved = (parameter.detach() if plain else parameter).to(device)
        memo[id(parameter)] = torch.nn.Parameter(moved, requires_grad=False) if plain else moved
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to(device)
    copied = copy.deepcopy(module, memo)
    return copied.to(device) if device.type == "cuda" else copied


def _moved(value: Any, source: torch.device, target: torch.device) -> Any:
    """Move tensors that are on `source`; others, such as times on the CPU, stay."""
    if source == target:
        return value
    if torch.is_tensor(value):
        return value.to(target) if value.device == source else value
    if isinstance(value, dict):
        moved = {name: _moved(item, source, target) for name, item in value.items()}
        make: Any = type(value)
        return moved if make is dict else make(**moved)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, source, target) for item in value)
    return value
