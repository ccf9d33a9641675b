"""Keeps the embeddings of prompts, so that the same text is not encoded again.

It stands before a pipeline's own `encode_prompt`, whose arguments are the text and all settings of
the encoding (negative prompt, clip_skip, longest sequence, outputs for each prompt). What it gives
back is equal to the byte to what encoding gives. A call with anything else than plain values, such
as images or tensors, is passed on. Knows no family and no adapter.
"""

import functools
import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from workers.patches import signature_of

_PLAIN = (str, int, float, bool, type(None), torch.device, torch.dtype)


class PromptCache:
    """The embeddings used last, up to so many bytes; thread-safe.

    Attributes:
        hits: Encodings that were there.
        misses: Encodings that had to be made.
        bytes: What is kept, tensors and text.
    """

    def __init__(self, most_bytes: int) -> None:
        """Keep nothing where `most_bytes` is 0."""
        self.hits = self.misses = self.bytes = 0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def watch(self, pipe: Any, encoders: Callable[[], Hashable]) -> None:
        """Have `pipe`, a copy for one run, look here before it encodes.

        `encoders` returns what the text encoders are set to at the time: adapters and types.
        """
        if not self._most_bytes or not hasattr(pipe, "encode_prompt"):
            return
        encode = pipe.encode_prompt
        signature = signature_of(encode)
        if inspect.ismethod(encode):
            # Weakly: a pipeline that holds itself keeps the tensors of its run.
            encode = functools.partial(_encoded, weakref.ref(pipe), encode.__func__)
        kind = type(pipe)

        def remembered(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            try:
                asked = _key(bound.arguments)
            except TypeError:
                return encode(*args, **kwargs)
            key = (kind, encoders(), asked)
            found = self._find(key)
            if found is None:
                found = encode(*args, **kwargs)
                self._keep(key, found)
            # A pipeline may change in place what it was given.
            return _copied(found)

        untyped: Any = remembered
        untyped.__signature__ = signature
        # Not by setattr, which would register it in the configuration.
        pipe.__dict__["encode_prompt"] = remembered

    def _find(self, key: Hashable) -> Any:
        with self._lock:
            if key not in self._kept:
                self.misses += 1
                return None
            self.hits += 1
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def _keep(self, key: Hashable, made: Any) -> None:
        try:
            size = sum(tensor.nbytes for tensor in _tensors(made)) + _text_bytes(key)
        except TypeError:
            return
        # What is cut out of something larger would keep all of it.
        own = _copied(made)
        with self._lock:
            if key in self._kept or size > self._most_bytes:
                return
            self._kept[key] = own, size
            self.bytes += size
            while self.bytes > self._most_bytes:
                _, (_, freed) = self._kept.popitem(last=False)
                self.bytes -= freed


def _encoded(pipe: Any, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return encode(pipe(), *args, **kwargs)


def _key(value: Any) -> Hashable:
    """A value as part of a key; with its type, for True, 1 and 1.0 are equal; else TypeError."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return dict, tuple((name, _key(item)) for name, item in value.items())
    raise TypeError(type(value).__name__)


def _text_bytes(key: Any) -> int:
    if isinstance(key, str):
        return len(key.encode("utf-8", "replace"))
    return sum(_text_bytes(item) for item in key) if isinstance(key, tuple) else 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that an encoding is made of; TypeError where it is more than that."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif not isinstance(value, _PLAIN):
        raise TypeError(type(value).__name__)


def _copied(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
