"""The parts and weights of a pipeline's modules, found at once.

Torch keeps them in dictionaries of each module, where Python looks after it has looked everywhere
else; and a dropout asks in each call whether there is training. On a denoiser whose time is mostly
overhead that is a tenth of a forward of one request, all of it under the interpreter's lock. Knows
nothing of what the modules compute together.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch


def note_places(module: torch.nn.Module) -> None:
    """Write down on each module where its parts and weights are; calls are as before.

    Parts and weights that are replaced by others later, as adapters and offloading do, are found as
    ever. For modules that serve only, and whose parts are not deleted.
    """
    for owner in module.modules():
        for name, part in owner._modules.items():
            # What the class has of that name is what Python finds today. Torch itself takes the
            # part out again when another is set in its place.
            if part is not None and not hasattr(type(owner), name):
                owner.__dict__[name] = part
        if "forward" in owner.__dict__:
            continue
        if type(owner) is torch.nn.Dropout and not owner.training:
            owner.__dict__["forward"] = _as_it_is
        elif type(owner) is torch.nn.Linear and "weight" in owner._parameters:
            # The dictionary, for the weights in it may change. In a copy it is the copy's.
            owner.__dict__["forward"] = partial(_linear, owner._parameters)
        elif type(owner) is torch.nn.LayerNorm:
            owner.__dict__["forward"] = partial(
                _layer_norm, owner._parameters, owner.normalized_shape, owner.eps
            )


# Torch calls it `input`, and so do those that name it (the linear layers of AnimateDiff's motion).
def _as_it_is(input: Any) -> Any:  # noqa: A002
    return input


def _layer_norm(
    weights: Mapping[str, Any],
    shape: tuple[int, ...],
    eps: float,
    input: torch.Tensor,  # noqa: A002
) -> torch.Tensor:
    return torch.nn.functional.layer_norm(input, shape, weights["weight"], weights["bias"], eps)


def _linear(weights: Mapping[str, Any], input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    return torch.nn.functional.linear(input, weights["weight"], weights["bias"])
