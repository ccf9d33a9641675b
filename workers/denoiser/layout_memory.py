"""The layout of a pipeline's last call, for the next one that looks the same.

All calls of one denoising loop look the same but for the numbers in their tensors, and finding out
how a call merges takes longer than seeing that. Knows no rules of merging.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from workers.denoiser.merging import Layout

_PLAIN = (type(None), bool, int, float, str, torch.dtype)


class LayoutMemory:
    """Remembers one layout; used in one thread."""

    def __init__(self) -> None:
        """Remember none."""
        self._look: Hashable = None
        self._layout: Layout | None = None

    def layout(self, arguments: Mapping[str, Any], make: Callable[[Any], Layout]) -> Layout:
        """Return the layout of a call: that of the last if it looks like it, else one by `make`.

        Raises what `make` raises.
        """
        look = _look(arguments)
        if self._layout is None or look is None or look != self._look:
            self._layout = None
            self._layout, self._look = make(arguments), look
        return self._layout


def _look(value: Any) -> Hashable:
    """All that a layout can depend on; None where that is more than can be told here."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        looks = [_look(item) for item in value.values()]
        return None if None in looks else (*value, *looks)
    if isinstance(value, (list, tuple)):
        looks = [_look(item) for item in value]
        return None if None in looks else (type(value), *looks)
    return None
