"""How the arguments of a call travel: what is unpacked and filled is what was packed."""

import pickle
import threading
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from workers.devices.rank_messages import as_bytes, pack, unpack

CPU = torch.device("cpu")


def sent(value: Any) -> Any:
    """What arrives, with the bytes of the tensors copied as a broadcast would."""
    packed, tensors = pack(value, CPU)
    arrived, empty = unpack(packed, CPU)
    for source, target in zip(as_bytes(tensors), as_bytes(empty), strict=True):
        target.copy_(source)
    return arrived


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(7),
        torch.tensor(3.5).expand(1),
        torch.arange(3.0).expand(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.arange(9.0)[4:],
        torch.empty(0, 3),
    ],
    ids=["scalar", "expanded", "rows", "turned", "bool", "bfloat16", "part", "empty"],
)
def test_tensors_of_every_kind_arrive(tensor: torch.Tensor):
    arrived = sent(tensor)
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived, tensor)


def test_what_is_around_the_tensors_arrives_too():
    shared = torch.ones(2)
    value = {"a": [shared, (1, None)], "b": Transformer2DModelOutput(shared), "c": torch.float16}
    arrived = sent(value)
    assert arrived["a"][1] == (1, None)
    assert type(arrived["b"]) is Transformer2DModelOutput
    assert arrived["c"] is torch.float16
    assert arrived["a"][0] is arrived["b"].sample


def test_tensors_elsewhere_are_pickled():
    packed, tensors = pack(torch.ones(2), torch.device("meta"))
    assert tensors == []
    assert torch.equal(unpack(packed, torch.device("meta"))[0], torch.ones(2))


def test_what_cannot_be_sent_is_an_error_of_the_sender():
    with pytest.raises((TypeError, pickle.PicklingError)):
        pack(threading.Lock(), CPU)
