"""What a failure of torch or diffusers was, in one line. Knows no request and no model."""

from textwrap import shorten

import torch

# Characters of a cause.
_CAUSE = 240


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether a device or the host had too little memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return any(sign in text for sign in ("out of memory", "can't allocate memory", "alloc_failed"))


def short_cause(error: BaseException) -> str:
    """Return an error as one line: its class and the beginning of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {shorten(lines[0], _CAUSE, placeholder=' …')}".rstrip(" :.")
