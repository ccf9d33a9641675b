"""One pipeline's seat at the rendezvous: for whom it calls, and what wakes its thread.

A pipeline works for one request, or for several that started together. Knows no tensors.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from workers.denoiser.layout_memory import LayoutMemory


class Bell:
    """Wakes one thread; rung before it waits, it does not wait."""

    def __init__(self) -> None:
        """Not rung yet."""
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the thread; ringing twice is ringing once. Under the rendezvous' lock."""
        if self._silence.locked():
            self._silence.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait to be rung, so many seconds at most."""
        self._silence.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Member:
    """It is waited for only between its first call and :meth:`leave`.

    Attributes:
        outputs: For each request that the pipeline was called for, how many outputs it has; their
            samples lie in that order. Of a lone request they count as one, for it is never cut.
        alone: Whether its calls are never merged.
        key: What the denoiser must be set to for its calls, such as its LoRA adapters; calls of
            different keys are never merged.
        present: For each request that the pipeline was called for, whether it still wants its
            samples. Rows of the others are left out of the forwards, where that can be.
        kind: That of its last call, for identity only; None while nobody need wait for it.
        bell: Wakes its thread.
        layouts: Remembers the layout of its calls.
    """

    def __init__(
        self,
        forget: Callable[["Member"], None],
        *,
        alone: bool,
        key: Hashable,
        outputs: Sequence[int],
    ) -> None:
        """Made by :meth:`Rendezvous.member`."""
        self.alone = alone
        self.key = key
        self.outputs = tuple(outputs) if len(outputs) > 1 else (1,)
        self.present = [True] * len(outputs)
        self.kind: Any = None
        self.bell = Bell()
        self.layouts = LayoutMemory()
        self._forget = forget
        self._forwards = self._shared = 0

    @property
    def batch_mean(self) -> float:
        """Mean number of requests that shared its forwards, its own included."""
        return self._shared / self._forwards if self._forwards else 1.0

    def leave(self) -> None:
        """Be waited for no longer; further calls run alone."""
        self.alone = True
        self._forget(self)

    def count(self, shared: int) -> None:
        """Note how many requests shared a forward of it."""
        self._forwards += 1
        self._shared += shared
