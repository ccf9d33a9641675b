"""The signatures of a denoiser's attention processors, found out once.

Diffusers' attention asks `inspect.signature` for them in each layer of each call: on a small
denoiser that is a twentieth of its time, all of it under the interpreter's lock. What it asks is
the `__call__` of the processor, and a signature that is written down there it takes. Knows nothing
of what attention does.
"""

import functools
import inspect
from typing import Any

import torch


def note_signatures(module: torch.nn.Module) -> None:
    """Write the signatures down on the processors of the module's parts; calls are as before.

    Only on the instances: pipelines that are not ours to change keep theirs. One that a part gets
    later is asked each time, as ever.
    """
    for part in module.modules():
        processor: Any = part.__dict__.get("processor")
        # A processor that is a module itself has hooks in its `__call__`.
        if processor is None or isinstance(processor, torch.nn.Module):
            continue
        call = processor.__call__
        if callable(call) and "__call__" not in getattr(processor, "__dict__", {"__call__": None}):
            noted: Any = functools.partial(type(processor).__call__, processor)
            noted.__signature__ = inspect.signature(call)
            processor.__dict__["__call__"] = noted
