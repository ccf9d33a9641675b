"""What a replica and its ranks say to each other, over a pipe of their own.

A rank answers `LOADED` or :class:`Failed`, is told to join, answers `READY`, and from then on does
what it is told; a broken pipe means that the other side has ended. Imports no torch.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from configs.stages import EngineArgs

LOADED: Final = "loaded"
JOIN: Final = "join"
READY: Final = "ready"
# Rank 0 failed in a call; a rank answers that once it has ended its own part, in whichever way.
UNDONE: Final = "undone"
END: Final = "end"
# Seconds for which one side waits for the other after a call has failed.
VERDICT_S: Final = 10.0


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
    """A rank could not start, and why."""

    cause: str


@dataclass(frozen=True, slots=True)
class Forward:
    """A call of a denoiser; its tensors follow by broadcast."""

    denoiser: str
    packed: bytes


@dataclass(frozen=True, slots=True)
class Change:
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
