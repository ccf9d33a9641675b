"""Changes of a denoiser that reach its copies and ranks."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from workers.patches import put

CHANGES = (
    *("load_lora_adapter", "add_adapter", "delete_adapters", "unload_lora"),
    *("set_adapter", "set_adapters", "enable_adapters", "disable_adapters"),
    *("enable_lora", "disable_lora", "fuse_lora", "unfuse_lora"),
    *("set_attention_backend", "reset_attention_backend", "compile_repeated_blocks"),
)


Repeat = Callable[[str, tuple[Any, ...], dict[str, Any]], None]


_changing = threading.local()


def repeat_changes(module: torch.nn.Module, repeat: Repeat) -> None:
    """Have `repeat` called with each method named in ``CHANGES`` that is called on the module.

    After the module's own, and not where that raised.
    """
    for name in CHANGES:
        if hasattr(module, name):
            put(module, name, _repeated(getattr(module, name), name, repeat))


def _repeated(own: Callable[..., Any], name: str, repeat: Repeat) -> Callable[..., Any]:
    @functools.wraps(own)
    def changed(*args: Any, **kwargs: Any) -> Any:
        if getattr(
            _changing, "now", False
        ):  # called by another change, which does it elsewhere too
            return own(*args, **kwargs)
        _changing.now = True
        try:
            result = own(*args, **kwargs)
            repeat(name, args, kwargs)
        finally:
            _changing.now = False
        return result

    return changed
