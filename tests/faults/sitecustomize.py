"""Breaks worker processes of the tests; with this folder on PYTHONPATH, as ``FAULTS`` says.

``FAULTS="72:kill,80:cuda"``: inside a denoiser call for an output 72 pixels wide the process is
killed, for one 80 pixels wide its device is lost. The model is loaded and served as ever; only the
first layer of its denoiser is watched, and the width of its input tells whose call it is.

=======  ==========================================================================================
kill     SIGKILL, as by the kernel's own hand
cuda     the error of a poisoned CUDA context, and from then on for every call, whoever makes it
memory   the error of a device without memory, once each time
=======  ==========================================================================================
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_LOADER = "workers.engine.loader"


def _faults() -> dict[int, str]:
    pairs = (pair.split(":") for pair in os.environ.get("FAULTS", "").split(",") if pair)
    return {int(width): kind for width, kind in pairs}


class _Breaker:
    """Stands before the first layer of the denoiser."""

    def __init__(self, faults: dict[int, str], scale: int) -> None:
        self._faults = faults
        self._scale = scale
        self._poisoned = False

    def __call__(self, _layer: Any, arguments: tuple[Any, ...]) -> None:
        import torch

        kind = self._faults.get(arguments[0].shape[-1] * self._scale)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        self._poisoned |= kind == "cuda"
        if self._poisoned:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class _Finder(MetaPathFinder):
    """Watches for the module that loads pipelines, and has it load broken ones."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _LOADER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.load = _breaking(module.load)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _breaking(load: Any) -> Any:
    def load_broken(*arguments: Any) -> Any:
        loaded = load(*arguments)
        breaker = _Breaker(_faults(), loaded.pipe.vae_scale_factor)
        loaded.pipe.unet.conv_in.register_forward_pre_hook(breaker)
        return loaded

    return load_broken


if _faults():
    sys.meta_path.insert(0, _Finder())
