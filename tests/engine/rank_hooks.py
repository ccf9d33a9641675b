"""What a test has ranks do to their denoisers; imported in the processes of the ranks."""

from typing import Any

import torch


def refuse(
    value: float, error: Exception, _module: Any, _args: Any, kwargs: dict[str, Any]
) -> None:
    """Fail a call in which that is the largest value of a sample."""
    if kwargs["hidden_states"].max() == value:
        raise error


def refuse_any(error: Exception, _module: Any, _args: Any) -> None:
    """Fail every call."""
    raise error


class Scarce(torch.Tensor):
    """A weight for which there is too little memory in float32."""

    def float(self, **_: Any) -> torch.Tensor:
        raise MemoryError("too little memory")


class Unmovable(torch.Tensor):
    """A weight for which another device has too little memory."""

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("too little memory")
