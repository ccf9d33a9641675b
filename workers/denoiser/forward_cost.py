"""What one forward of a denoiser costs: seconds, and on CUDA memory. Knows no requests."""

import time
from types import TracebackType
from typing import Self

import torch


class ForwardCost:
    """Measures a forward; use as a context around it, which ends when the device has done it.

    Attributes:
        seconds: Of the work itself, not of handing it to the device.
        peak_bytes: Most memory that was taken on top of what was taken before; None on a CPU.
        free_bytes: Memory that a next forward may take; None on a CPU.
    """

    def __init__(self, device: torch.device | None) -> None:
        """Measure what runs on `device`; None measures the seconds alone."""
        self.seconds = 0.0
        self.peak_bytes: int | None = None
        self.free_bytes: int | None = None
        self._device = device if device is not None and device.type == "cuda" else None
        self._before = 0

    def __enter__(self) -> Self:
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._device is not None and error is None:
            # So that the time is that of the work, and what goes wrong is raised here.
            torch.cuda.current_stream(self._device).synchronize()
        self.seconds = time.perf_counter() - self._started
        if self._device is not None:
            # What encoders and autoencoders of other requests take meanwhile is counted too.
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
            allocated = torch.cuda.memory_allocated(self._device)
            cached = torch.cuda.memory_reserved(self._device) - allocated
            self.free_bytes = torch.cuda.mem_get_info(self._device)[0] + cached
