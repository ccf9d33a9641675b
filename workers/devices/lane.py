"""One device of a replica's chunk and the thread that works on it.

On a CPU the device is one core: the thread is pinned to it and uses one torch thread. Knows nothing
of what is run.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Lane:
    """A device with a thread of its own.

    Attributes:
        device: Where its work is done.
    """

    def __init__(self, device: torch.device, core: int | None = None) -> None:
        """Start the thread, pinned to the operating system's `core` if one is given."""
        self.device = device
        self._core = core
        self._pool = ThreadPoolExecutor(1, f"lane-{device}-{core}", self._begin)
        # Here, so that what goes wrong is raised now; and see `open_lanes`.
        self._pool.submit(bool).result()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run it in the lane's thread, under the inference mode of the caller."""
        return self._pool.submit(self._run, torch.is_inference_mode_enabled(), function, args)

    def close(self) -> None:
        """End the thread once its work is done."""
        self._pool.shutdown(wait=False)

    def _begin(self) -> None:
        if self.device.type == "cpu":
            if self._core is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {self._core})
            # Asked first, since the first question in a thread sets it anew.
            torch.get_num_threads()
            torch.set_num_threads(1)

    def _run(self, inference: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        on_device: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "cuda":
            on_device = torch.cuda.device(self.device)
        # Both hold for one thread only.
        with torch.inference_mode(inference), on_device:
            return function(*args)


def open_lanes(kind: str, count: int) -> list[Lane]:
    """Open a lane for each of `count` devices: CUDA devices 0 and up, or this process' cores."""
    if kind == "cuda":
        return [Lane(torch.device("cuda", index)) for index in range(count)]
    before = torch.get_num_threads()
    lanes = [Lane(torch.device("cpu"), core) for core in chunk_cores(count)]
    # torch's setting counts for its thread and for threads that begin later: those of the requests.
    torch.set_num_threads(before)
    return lanes


def chunk_cores(count: int) -> Sequence[int | None]:
    """Return a core of this process for each of `count` devices; Nones where it has too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return cores[:count] if len(cores) >= count else [None] * count
