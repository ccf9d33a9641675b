"""The parts of a pipeline's modules, found at once.

Torch keeps a module's parts in a dictionary of their own, where Python looks after it has looked
everywhere else; and a dropout asks in each call whether there is training. On a denoiser whose
time is mostly overhead the two are a twentieth of a forward of one request, all of it under the
interpreter's lock. Knows nothing of what the modules compute.
"""

from typing import Any

import torch


def note_parts(module: torch.nn.Module) -> None:
    """Put the parts of each module where Python looks first; calls are as before.

    A part that is replaced by another later, as adapters do, is found as ever: torch takes the old
    one out. For modules that serve only, and whose parts are not deleted.
    """
    for owner in module.modules():
        for name, part in owner._modules.items():
            # What the class has of that name is what Python finds today.
            if part is not None and not hasattr(type(owner), name):
                owner.__dict__[name] = part
        if type(owner) is torch.nn.Dropout and not owner.training:
            owner.__dict__.setdefault("forward", _as_it_is)


def _as_it_is(hidden: Any) -> Any:
    return hidden
