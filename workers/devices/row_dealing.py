"""The rows of each call of a denoiser dealt over several that can run it.

The rows are the two halves of classifier-free guidance, several outputs of a request, or what the
rendezvous has merged. `forward` is replaced on the instance: whoever calls the denoiser knows
nothing of it. A call of one row, and one that no rule can cut, runs whole. The first call of each
kind also runs whole; were the two to differ by more than rounding, that kind would never be cut
again. Does not know where the parts run: copies on other devices, or groups of ranks.
"""

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from workers.denoiser.merging import Arguments, Unmergeable, layout
from workers.denoiser.method_signatures import method_signature
from workers.denoiser.rounding import excess
from workers.denoiser.row_choice import place_rows

_logger = logging.getLogger(__name__)

_KINDS_KEPT = 1000
Forward = Callable[..., Any]
# Takes the arguments of a call by name, its rows, and those of each part; returns the parts'
# outputs.
RunParts = Callable[[Arguments, int, Sequence[range]], list[Any]]


def deal_rows(rows: int, parts: int) -> list[range]:
    """Return the rows of each of up to `parts` parts, as even as can be, none empty."""
    parts = min(rows, parts)
    ends = [-(-rows * (index + 1) // parts) for index in range(parts)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def deal_calls(module: torch.nn.Module, parts: int, whole: Forward, run_parts: RunParts) -> None:
    """Have the rows of each call of the module run as up to `parts` parts, or the call as a whole.

    The error of a part is that of the call.
    """
    dealt = _DealtForward(parts, whole, run_parts)
    module.forward = functools.wraps(type(module).forward)(dealt.bind(type(module)))


class _DealtForward:
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
                output = self._dealt(arguments, described.rows)
            except Unmergeable as error:
                self._note(kind, right=False, reason=f"{error.name} can not be cut")
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

    def _dealt(self, arguments: Arguments, rows: int) -> Any:
        dealt = deal_rows(rows, self._parts)
        return place_rows(self._run_parts(arguments, rows, dealt), dealt, rows)

    def _note(self, kind: Hashable, *, right: bool, reason: str) -> None:
        if len(self._right) > _KINDS_KEPT:
            self._right.clear()
        self._right[kind] = right
        if not right:
            _logger.warning("denoiser calls of this kind are not cut over devices: %s", reason)
