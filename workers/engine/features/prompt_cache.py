"""Keeps the embeddings of prompts, so that the same text is not encoded again.

It stands before a pipeline's own `encode_prompt`, whose arguments are the text and all settings of
the encoding (negative prompt, clip_skip, longest sequence, outputs for each prompt). What it gives
back is equal to the byte to what encoding gives. A call with anything else than plain values, such
as images or tensors, is passed on.
"""

import functools
import inspect
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import repeat
from typing import Any, Self

import torch

from workers.engine.run import Feature, Parts, Run
from workers.patches import method_signature, put

_PLAIN = (str, int, float, bool, type(None), torch.device, torch.dtype)


class PromptCache(Feature):
    """The embeddings used last, up to so many bytes; thread-safe.

    Attributes:
        hits: Encodings that were there.
        misses: Encodings that had to be made.
        bytes: What is kept, tensors and text.
    """

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """Return an empty one; None where the settings switch it off."""
        settings = parts.settings
        on = settings.enable_prompt_embed_cache and settings.prompt_embed_cache_bytes
        return cls(settings.prompt_embed_cache_bytes) if on else None

    def __init__(self, most_bytes: int) -> None:
        """Keep nothing yet."""
        self.hits = self.misses = 0
        self.bytes = 0.0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Any, float]] = OrderedDict()

    def attach(self, run: Run) -> None:
        """Have the pipeline of a run look here before it encodes."""
        pipe, state = run.pipe, run.text_state
        if not hasattr(pipe, "encode_prompt"):
            return
        encode = pipe.encode_prompt
        signature = _signature(encode)
        if inspect.ismethod(encode):
            # Weakly: a pipeline that holds itself keeps the tensors of its run.
            encode = functools.partial(_encoded, weakref.ref(pipe), encode.__func__)
        kind = type(pipe)

        def remembered(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            texts: list[str] = []
            try:
                asked = _key(bound.arguments, texts)
            except TypeError:
                return encode(*args, **kwargs)
            key = (kind, state, asked)
            found = self._find(key)
            if found is None:
                found = encode(*args, **kwargs)
                self._keep(key, found, len("".join(texts).encode("utf-8", "replace")))
            # A pipeline may change in place what it was given.
            return _copied(found, [])

        untyped: Any = remembered
        untyped.__signature__ = signature
        # It calls what another feature may have put there.
        put(pipe, "encode_prompt", remembered, over=True)

    def _find(self, key: Hashable) -> Any:
        with self._lock:
            if key not in self._kept:
                self.misses += 1
                return None
            self.hits += 1
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def _keep(self, key: Hashable, made: Any, text_bytes: int) -> None:
        sizes: list[float] = []
        # What is cut out of something larger would keep all of it.
        own = _copied(made, sizes)
        size = sum(sizes) + text_bytes
        with self._lock:
            if key in self._kept or size > self._most_bytes:
                return
            self._kept[key] = own, size
            self.bytes += size
            while self.bytes > self._most_bytes:
                _, (_, freed) = self._kept.popitem(last=False)
                self.bytes -= freed


def _signature(encode: Callable[..., Any]) -> inspect.Signature:
    """The signature of a call, found out once for each class of pipelines."""
    if inspect.ismethod(encode):
        return method_signature(encode.__func__)
    return inspect.signature(encode)


def _encoded(pipe: Any, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return encode(pipe(), *args, **kwargs)


def _key(value: Any, texts: list[str]) -> Hashable:
    """A value as part of a key; with its type, for True, 1 and 1.0 are equal; else TypeError.

    The texts in it are added to `texts`.
    """
    if isinstance(value, _PLAIN):
        if isinstance(value, str):
            texts.append(value)
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_key, value, repeat(texts)))
    if isinstance(value, dict):
        return dict, tuple(value), tuple(map(_key, value.values(), repeat(texts)))
    raise TypeError(type(value).__name__)


def _copied(value: Any, sizes: list[float]) -> Any:
    """A copy of an encoding; the bytes of each of its tensors are added to `sizes`.

    They are infinite where it is made of more than tensors and plain values.
    """
    if torch.is_tensor(value):
        sizes.append(value.nbytes)
        return value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value, repeat(sizes)))
    if not isinstance(value, _PLAIN):
        sizes.append(math.inf)
    return value
