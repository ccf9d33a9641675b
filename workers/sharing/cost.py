"""What forwards cost, measured without waiting for the device."""

import time
from types import TracebackType
from typing import Any, Self

import torch


def mark(device: torch.device, *, timing: bool = False) -> Any:
    """Return an event that the device comes to once it has done what it was given so far.

    Whoever waits for it sleeps, so that other threads have the core.
    """
    untyped: Any = torch.cuda
    event = untyped.Event(enable_timing=timing, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def free_bytes(device: torch.device) -> int:
    """Return the memory of a CUDA device that this process may still take, in bytes."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


class ForwardCost:
    """Measures a forward; use as a context around it, which ends once the device was given it.

    On a CPU everything is known at the end of the context, and the memory is not.

    Attributes:
        peak_bytes: Most memory that was taken on top of what was taken before; None where it was
            not looked at. What encoders and autoencoders of others take meanwhile is counted too.
        free_bytes: Memory that a next forward may take; the same.
    """

    def __init__(self, device: torch.device | None, *, memory: bool = True) -> None:
        """Measure what runs on `device`; None measures the seconds alone.

        Without `memory` its statistics, which take the host a tenth of a millisecond to read, are
        not looked at.
        """
        self.peak_bytes: int | None = None
        self.free_bytes: int | None = None
        self._device = device if device is not None and device.type == "cuda" else None
        self._memory = memory and self._device is not None
        self._before = 0
        self._seconds = 0.0
        self._marks: list[Any] = []

    def __enter__(self) -> Self:
        if self._memory:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        if self._device is not None:
            self._marks.append(mark(self._device, timing=True))
        self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._seconds = time.perf_counter() - self._started
        if self._device is not None and error is None:
            self._marks.append(mark(self._device, timing=True))
        if self._memory:
            # The host hands memory out, so the peak is known before the device has come to it.
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
            assert self._device is not None
            self.free_bytes = free_bytes(self._device)

    @property
    def known(self) -> bool:
        """Whether the device has done it."""
        return all(each.query() for each in self._marks[1:])

    @property
    def seconds(self) -> float:
        """Of the work itself, not of handing it to the device; waits for that."""
        if len(self._marks) < 2:
            return self._seconds
        self.wait()
        return float(self._marks[0].elapsed_time(self._marks[1])) / 1000

    def wait(self) -> None:
        """Wait until the device has done it."""
        for each in self._marks[1:]:
            each.synchronize()
