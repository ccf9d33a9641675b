"""Copies of a denoiser on the devices of the chunk, which share the rows of each call.

How a call is cut, and that it is right so, is known to ``workers.devices.row_dealing``; a call that
is not cut runs on the first device alone. Does not know pipelines, requests and processes.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import torch

from workers.denoiser.changes import repeat_changes
from workers.denoiser.merging import Arguments
from workers.denoiser.row_choice import choose_rows
from workers.devices.lane import Lane
from workers.devices.row_dealing import deal_calls

_copies: weakref.WeakKeyDictionary[torch.nn.Module, tuple[torch.nn.Module, ...]] = (
    weakref.WeakKeyDictionary()
)


def each_copy(module: Any) -> tuple[Any, ...]:
    """Return the denoiser itself and all its copies.

    Adapters need no care: the methods of ``workers.denoiser.changes`` reach the copies when called
    on the denoiser, and with them a pipeline's own `load_lora_weights`, `set_adapters` and so on.
    Whoever changes a denoiser in another way changes each of these.
    """
    return (module, *_copies.get(module, ()))


def spread_rows(module: torch.nn.Module, lanes: Sequence[Lane]) -> None:
    """Put a copy of the denoiser on the device of each lane after the first, and share its calls.

    The denoiser itself stays on the device of the first lane. On a CPU all have the same weights
    in memory. Called before anything else replaces its `forward` or hooks into it.

    Raises:
        ValueError: Something has replaced the `forward` of a part already; a copy would run that of
            the original.
    """
    hooked = [name for name, part in module.named_modules() if "forward" in part.__dict__]
    if hooked:
        raise ValueError(
            f"{type(module).__name__}.{hooked[0]}: its forward is replaced by a hook (offload,"
            " layerwise casting, a cache), and copies on several devices do not go with that"
        )
    others = tuple(_copy_to(module, lane.device) for lane in lanes[1:])
    _copies[module] = others

    def repeat(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for other in others:
            getattr(other, name)(*args, **kwargs)
            other.eval()  # the layers of a new adapter are not

    repeat_changes(module, repeat)
    forwards = [module.forward, *others]
    home = lanes[0].device

    def run_part(forward: Callable[..., Any], part: Arguments, device: torch.device) -> Any:
        moved = {name: _moved(value, home, device) for name, value in part.items()}
        return _moved(forward(**moved), device, home)

    def run_parts(arguments: Arguments, rows: int, dealt: Sequence[range]) -> list[Any]:
        parts = [choose_rows(arguments, chosen, rows) for chosen in dealt]
        running = [
            lane.submit(run_part, forward, part, lane.device)
            for lane, forward, part in zip(lanes, forwards, parts, strict=False)
        ]
        wait(running)
        return [each.result() for each in running]

    # Whole, it runs in the caller's thread: on a CPU that is with the cores of all lanes.
    deal_calls(module, len(lanes), module.forward, run_parts)


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
