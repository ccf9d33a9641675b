"""What denoiser calls take of the memory of rank 0, so that one that cannot fit begins nowhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workers.sharing.cost import free_bytes

# Calls whose memory is known.
_CALLS_KEPT = 64


# Calls of one size that are looked at: the statistics take the host a tenth of a millisecond.
_LOOKS = 3


# Of what a call takes, at least so much grows with that of its arguments which grows most.
_GROWING = 0.5


class CallMemory:
    """What calls took at most of the memory of rank 0; on a CPU nothing is looked at.

    Rank 0 has encoders, autoencoder and requests beside its part of the denoiser, so it is where
    memory ends first. A call that fails in rank 0 alone leaves the others in a collective, which
    loses them all; one that is refused before they hear of it is an error of that call.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is known yet."""
        self._device = device if device.type == "cuda" else None
        self._taken: dict[tuple[str, tuple[int, ...]], int] = {}
        self._looked: dict[tuple[str, tuple[int, ...]], int] = {}

    def check(self, name: str, sizes: tuple[int, ...]) -> None:
        """Look whether a call of a denoiser can fit; `sizes` are those of its tensors, in bytes.

        Raises:
            torch.OutOfMemoryError: A call that was no larger took more than is free now.
        """
        if self._device is None:
            return
        needed = max((self._least(known, name, sizes) for known in self._taken), default=0)
        free = free_bytes(self._device)
        if needed > free:
            raise torch.OutOfMemoryError(
                f"a call of {name} takes {needed / 2**30:.1f} GiB or more of the first device,"
                f" where {free / 2**30:.1f} GiB are free"
            )

    @contextmanager
    def learn(self, name: str, sizes: tuple[int, ...]) -> Iterator[None]:
        """Learn what a call takes, unless it fails."""
        if self._device is None or self._looked.get((name, sizes), 0) >= _LOOKS:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        taken = int(torch.cuda.max_memory_allocated(self._device)) - before
        if len(self._taken) >= _CALLS_KEPT:
            self._taken.clear()
            self._looked.clear()
        # The least, since what other threads take meanwhile is counted too.
        known = self._taken.get((name, sizes), taken)
        self._taken[name, sizes] = min(known, taken)
        self._looked[name, sizes] = self._looked.get((name, sizes), 0) + 1

    def _least(
        self, known: tuple[str, tuple[int, ...]], name: str, sizes: tuple[int, ...]
    ) -> float:
        """What a call takes at least, by one that is known; 0 where that tells nothing."""
        denoiser, smaller = known
        if denoiser != name or len(smaller) != len(sizes) or not sizes:
            return 0
        growth = [size / less for size, less in zip(sizes, smaller, strict=True)]
        if min(growth) < 1:
            return 0
        return self._taken[known] * (1 + _GROWING * (max(growth) - 1))
