"""Copies of a denoiser on the devices of the chunk, which share the rows of each call.

The rows are the two halves of classifier-free guidance, several outputs of a request, or what the
rendezvous has merged. `forward` is replaced on the instance: whoever calls the denoiser knows
nothing of it. A call of one row, and one that no rule can cut, runs on the first device alone. The
first call of each kind also runs uncut; were the two to differ by more than rounding, that kind
would never be cut again. Does not know pipelines, requests and processes.
"""

import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import wait
from typing import Any

import torch

from workers.denoiser_changes import repeat_changes
from workers.lane import Lane
from workers.merging import Arguments, Unmergeable, layout
from workers.rounding import excess
from workers.row_choice import choose_rows, place_rows

_logger = logging.getLogger(__name__)

_KINDS_KEPT = 1000
_copies: weakref.WeakKeyDictionary[torch.nn.Module, tuple[torch.nn.Module, ...]] = (
    weakref.WeakKeyDictionary()
)


def each_copy(module: Any) -> tuple[Any, ...]:
    """Return the denoiser itself and all its copies.

    Adapters need no care: the methods of ``workers.denoiser_changes`` reach the copies when called
    on the denoiser, and with them a pipeline's own `load_lora_weights`, `set_adapters` and so on.
    Whoever changes a denoiser in another way changes each of these.
    """
    return (module, *_copies.get(module, ()))


def deal_rows(rows: int, parts: int) -> list[range]:
    """Return the rows of each of up to `parts` parts, as even as can be, none empty."""
    parts = min(rows, parts)
    ends = [-(-rows * (index + 1) // parts) for index in range(parts)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


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
    spread = _SpreadForward([module.forward, *others], lanes)
    module.forward = functools.wraps(type(module).forward)(spread.bind(type(module)))


class _SpreadForward:
    """The forward that stands for those of a denoiser and its copies."""

    def __init__(self, forwards: Sequence[Callable[..., Any]], lanes: Sequence[Lane]) -> None:
        self._forwards = forwards
        self._lanes = lanes
        self._home = lanes[0].device
        self._right: dict[Hashable, bool] = {}

    def bind(self, module_class: Any) -> Callable[..., Any]:
        """Return it as a function that knows the names of the arguments."""
        own = inspect.signature(module_class.forward)
        signature = own.replace(parameters=list(own.parameters.values())[1:])

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
                described = layout(arguments)
            except (TypeError, Unmergeable):
                return self._whole(args, kwargs)
            kind = described.signature
            if described.rows < 2 or self._right.get(kind) is False:
                return self._whole(args, kwargs)
            try:
                output = self._spread(arguments, described.rows)
            except Unmergeable as error:
                self._note(kind, right=False, reason=f"{error.name} can not be cut")
                return self._whole(args, kwargs)
            if kind in self._right:
                return output
            whole = self._whole(args, kwargs)
            worst = excess(output, whole)
            reason = f"they differ from what one gives, {worst:.3g} times as much as rounding may"
            self._note(kind, right=worst <= 1, reason=reason)
            # Where it is right the first call too has the bytes of those that follow.
            return output if worst <= 1 else whole

        return forward

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call uncut; on a CPU that is with the cores of all lanes."""
        return self._forwards[0](*args, **kwargs)

    def _spread(self, arguments: Arguments, rows: int) -> Any:
        dealt = deal_rows(rows, len(self._lanes))
        parts = [choose_rows(arguments, chosen, rows) for chosen in dealt]
        running = [
            lane.submit(self._run_part, forward, part, lane.device)
            for lane, forward, part in zip(self._lanes, self._forwards, parts, strict=False)
        ]
        wait(running)
        return place_rows([each.result() for each in running], dealt, rows)

    def _run_part(self, forward: Callable[..., Any], part: Arguments, device: torch.device) -> Any:
        moved = {name: _moved(value, self._home, device) for name, value in part.items()}
        return _moved(forward(**moved), device, self._home)

    def _note(self, kind: Hashable, *, right: bool, reason: str) -> None:
        if len(self._right) > _KINDS_KEPT:
            self._right.clear()
        self._right[kind] = right
        if not right:
            _logger.warning("denoiser calls of this kind are not cut over devices: %s", reason)


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
