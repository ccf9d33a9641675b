"""How the arguments of a call travel to another process: the tensors apart from all else.

Tensors on the device go by `torch.distributed`, as bytes, so that their type does not matter; the
rest is pickled. Knows neither processes nor what is called.
"""

import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._device = device
        self._indexes: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device != self._device:
            return None
        if id(value) not in self._indexes:
            self._indexes[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._indexes[id(value)], tuple(value.shape), value.dtype


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}
        self._device = device

    def persistent_load(self, found: Any) -> torch.Tensor:
        index, shape, dtype = found
        if index not in self.tensors:
            self.tensors[index] = torch.empty(shape, dtype=dtype, device=self._device)
        return self.tensors[index]


def pack(value: Any, device: torch.device) -> tuple[bytes, list[torch.Tensor]]:
    """Return what `value` is without the tensors on `device`, and these in order.

    Raises:
        pickle.PicklingError: Something in it can not be sent; so do TypeError and AttributeError.
    """
    file = io.BytesIO()
    packer = _Packer(file, device)
    packer.dump(value)
    return file.getvalue(), packer.tensors


def unpack(data: bytes, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """Return the value with tensors on `device` that are still to be filled, and these in order."""
    unpacker = _Unpacker(io.BytesIO(data), device)
    value = unpacker.load()
    return value, [unpacker.tensors[index] for index in sorted(unpacker.tensors)]


def as_bytes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory of each tensor that has any, byte by byte; a copy of scattered ones."""
    return [
        # One element of a tensor that was expanded is contiguous with a stride of 0.
        each.contiguous().as_strided((each.numel(),), (1,)).view(torch.uint8)
        for each in tensors
        if each.numel()
    ]
