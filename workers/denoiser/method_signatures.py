"""Signatures of methods, found out once for each function. Knows none of them."""

import functools
import inspect
from typing import Any


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
