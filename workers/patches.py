"""Changes to objects of torch and diffusers."""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
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


def signature_of(function: Any) -> inspect.Signature:
    """Return the signature of a function, or of a bound method: without `self`."""
    if not inspect.ismethod(function):
        return inspect.signature(function)
    return method_signature(function.__func__)


@functools.cache
def method_signature(function: Any) -> inspect.Signature:
    """Return the signature that a function has as the method of an object: without `self`."""
    own = inspect.signature(function)
    return own.replace(parameters=list(own.parameters.values())[1:])


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


_PLAIN = (torch.nn.Parameter, torch.Tensor)


_LOWER = frozenset({torch.float16, torch.bfloat16})


def can_rise(modules: Iterable[torch.nn.Module]) -> bool:
    """Tell whether there are weights below float32, all of them plain ones that can be changed.

    Quantized weights, and weights that are fetched from elsewhere when they are needed, cannot.
    """
    tensors = _tensors(modules)
    plain = all(
        type(tensor) in _PLAIN and type(tensor.data) is torch.Tensor and not tensor.is_meta
        for tensor in tensors
    )
    return plain and any(tensor.dtype in _LOWER for tensor in tensors)


@contextmanager
def in_float32(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Hold the weights in float32 meanwhile.

    Raises:
        torch.OutOfMemoryError: They do not fit twice; they are as before.
    """
    lowered: list[tuple[torch.Tensor, torch.dtype]] = []
    try:
        for tensor in _tensors(modules):
            if tensor.dtype in _LOWER:
                dtype = tensor.dtype
                tensor.data = tensor.data.float()
                lowered.append((tensor, dtype))
        yield
    finally:
        for tensor, dtype in lowered:
            tensor.data = tensor.data.to(dtype)
        torch.cuda.empty_cache()


def _tensors(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """All weights and buffers, each once."""
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return list({id(tensor): tensor for tensor in found}.values())
