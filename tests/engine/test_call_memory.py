"""A call that cannot fit into rank 0 is refused before the other ranks hear of it."""

from typing import Any

import pytest
import torch

from workers.devices.call_memory import CallMemory

GIB = 2**30


class Card:
    """A stand-in for what torch says of a device's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_gib: float) -> None:
        self.free = int(free_gib * GIB)
        self.peak = 0
        answers: dict[str, Any] = {
            "mem_get_info": lambda _: (self.free, 0),
            "memory_allocated": lambda _: 0,
            "memory_reserved": lambda _: 0,
            "max_memory_allocated": lambda _: self.peak,
            "reset_peak_memory_stats": lambda _: None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)


def learn(memory: CallMemory, card: Card, sizes: tuple[int, ...], gib: float) -> None:
    with memory.learn("transformer", sizes):
        card.peak = int(gib * GIB)


def test_a_call_that_took_more_than_is_free_by_now_is_refused(monkeypatch: pytest.MonkeyPatch):
    card, memory = Card(monkeypatch, 8), CallMemory(torch.device("cuda"))
    memory.check("transformer", (100, 10))  # nothing is known yet
    learn(memory, card, (100, 10), 4)
    memory.check("transformer", (100, 10))
    card.free = 3 * GIB
    with pytest.raises(torch.OutOfMemoryError, match=r"takes 4\.0 GiB or more .* 3\.0 GiB are"):
        memory.check("transformer", (100, 10))
    memory.check("transformer_2", (100, 10))
    memory.check("transformer", (100, 9))
    memory.check("transformer", (100,))
    learn(memory, card, (100, 10), 2)  # another thread had taken the rest
    memory.check("transformer", (100, 10))


def test_a_larger_call_takes_more_in_part(monkeypatch: pytest.MonkeyPatch):
    card, memory = Card(monkeypatch, 8), CallMemory(torch.device("cuda"))
    learn(memory, card, (100, 10), 4)
    memory.check("transformer", (200, 10))
    with pytest.raises(torch.OutOfMemoryError, match=r"takes 10\.0 GiB"):
        memory.check("transformer", (400, 10))


def test_a_call_that_fails_teaches_nothing_and_a_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    card, memory = Card(monkeypatch, 1), CallMemory(torch.device("cuda"))
    card.peak = 4 * GIB
    with pytest.raises(ValueError, match="failed"), memory.learn("transformer", (100,)):
        raise ValueError("failed")
    memory.check("transformer", (100,))
    on_cpu = CallMemory(torch.device("cpu"))
    learn(on_cpu, card, (100,), 4)
    on_cpu.check("transformer", (100,))
