"""A denoiser that a test can watch, hold and break, and threads that call it as requests do."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tests.waiting import wait_until
from workers.sharing.rendezvous import Rendezvous

TIMEOUT_S = 10


def masked_mean(text: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of what counts of each text, as a column."""
    kept = torch.ones(text.shape[:2]) if mask is None else mask.float()
    return (text.mean(2) * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)


class ToyDenoiser(torch.nn.Module):
    """Doubles its rows and adds the time; writes down how many rows it was called with.

    To that it adds what it reads of its text, if it has one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.busy = 0
        self.before: Callable[[torch.Tensor], None] = lambda _: None
        self.make: Callable[[torch.Tensor], Any] = lambda sample: sample
        self.read: Callable[[torch.Tensor, Any], torch.Tensor] = masked_mean

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        new_condition: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
    ) -> tuple[Any]:
        self.seen.append(len(sample))
        self.busy += 1
        try:
            self.before(sample)
            output = 2 * sample + timestep.reshape(-1, 1)
            if encoder_hidden_states is not None:
                output = output + self.read(encoder_hidden_states, encoder_hidden_states_mask)
            return (self.make(output),)
        finally:
            self.busy -= 1


class Gate:
    """Holds whoever passes it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._open.wait(TIMEOUT_S)

    def at(self, wanted: int) -> Callable[[int], None]:
        """Hold at that index alone."""

        def hold(index: int) -> None:
            if index == wanted:
                self()

        return hold

    def open(self) -> None:
        self._open.set()


class Requests:
    """Runs each request in a thread of its own; patient, so that who can meet does."""

    def __init__(self, threads: int = 8) -> None:
        self.denoiser = ToyDenoiser()
        self.rendezvous = Rendezvous([self.denoiser])
        self.rendezvous.queue.max_wait_s = TIMEOUT_S
        self.rendezvous.queue.wait_share = 1e12
        self.pool = ThreadPoolExecutor(threads)

    def start(
        self, calls: int = 1, value: float = 1.0, width: int = 3, **options: Any
    ) -> Future[Any]:
        """Start a request that calls the denoiser so often; its result is the last output."""
        return self.pool.submit(self._run, calls, value, width, **options)

    def meet(
        self, *values: float, width: int = 3, keys: Any = None, texts: Any = None
    ) -> list[Future[Any]]:
        """Have requests of these values call the denoiser at once; return what became of each."""
        gate = Gate()
        self.denoiser.before = gate
        first = self.start(width=1, alone=True)  # keeps the device while the others gather
        assert gate.reached.wait(TIMEOUT_S)
        keys = keys or [None] * len(values)
        texts = texts or [{}] * len(values)
        started = [
            self.start(value=value, width=width, key=key, **text)
            for value, key, text in zip(values, keys, texts, strict=True)
        ]
        wait_until(lambda: self.rendezvous.waiting == len(values), TIMEOUT_S, "the calls")
        self.denoiser.before = lambda _: None
        gate.open()
        first.result(TIMEOUT_S)
        return started

    def _run(
        self,
        calls: int,
        value: float,
        width: int,
        *,
        alone: bool = False,
        key: Any = None,
        first_time: float = 0.0,
        between: Callable[[int], object] = lambda _: None,
        **arguments: Any,
    ) -> Any:
        output: Any = None
        with self.rendezvous.member(alone=alone, key=key):
            for index in range(calls):
                between(index)
                sample = torch.full((1, width), value)
                output = self.denoiser(sample, torch.tensor(first_time + index), **arguments)[0]
        return output

    def close(self) -> None:
        self.pool.shutdown(wait=True)
