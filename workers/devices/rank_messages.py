"""What a replica and its ranks say to each other, over a pipe of their own."""

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from configs.stage_config import EngineArgs


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
        pickle.PicklingError: Something in it cannot be sent; so do TypeError and AttributeError.
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


LOADED: Final = "loaded"


JOIN: Final = "join"


READY: Final = "ready"


# A call failed; a rank answers that once it has ended its own part, in whichever way.
UNDONE: Final = "undone"


# The first rank of a group sends the tensors of its output to rank 0.
SEND_OUTPUT: Final = "send output"


# A rank holds its weights in float32, and back again.
TO_FLOAT32: Final = "to float32"


TO_USUAL_DTYPE: Final = "to usual dtype"


END: Final = "end"


# Seconds for which one side waits for the other after a call has failed.
UNDO_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a rank.

    Attributes:
        rank: Its number, from 1.
        world_size: Ranks of the replica, this process' parent included.
        port: Where they meet, on 127.0.0.1.
        core: The core it is pinned to on a CPU; None for CUDA, where it takes device number `rank`.
        args: What is served.
        kind: `cpu` or `cuda`.
        denoisers: Classes of diffusers and dtypes of the parts it loads, by their names.
    """

    rank: int
    world_size: int
    port: int
    core: int | None
    args: EngineArgs
    kind: str
    denoisers: Mapping[str, tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank could not do what it was told, and why.

    Attributes:
        cause: One line.
        out_of_memory: Whether it had too little memory.
    """

    cause: str
    out_of_memory: bool = False

    def as_error(self) -> Exception:
        """Return what rank 0 raises for it."""
        return MemoryError(self.cause) if self.out_of_memory else RuntimeError(self.cause)


@dataclass(frozen=True, slots=True)
class Forward:
    """A call of a denoiser; its tensors follow by broadcast.

    Attributes:
        denoiser: Its name.
        packed: The arguments.
        rows: Samples in it, where it is split.
        split: Rows of each group; further groups have none. Empty where the first runs it whole.
    """

    denoiser: str
    packed: bytes
    rows: int = 0
    split: tuple[range, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """A rank has run its part.

    Attributes:
        packed: What came of it, by the first rank of a group; its tensors follow once rank 0 takes
            them. Empty from the others, who have the same.
    """

    packed: bytes = b""


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A method of a denoiser to be called, with its arguments."""

    denoiser: str
    method: str
    packed: bytes


def send(pipe: Connection, message: Any) -> None:
    """Send a message; raises OSError where the other side has ended."""
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe: Connection) -> Any:
    """Wait for a message; raises EOFError or OSError where the other side has ended."""
    # Only this process' own parent or child writes to the pipe.
    return pickle.loads(pipe.recv_bytes())  # noqa: S301
