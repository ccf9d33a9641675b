"""Checks of merging in half precision, whose rounding is coarse: wrong rows show all the same."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from workers.sharing.call import Call, Member
from workers.sharing.checks import excess, spread, step_of, worst_excess
from workers.sharing.merging import merge, split

NAMES = ("sample", "timestep", "encoder_hidden_states")


class SmallNetwork:
    """A network that hears little of time and text beside its sample."""

    def __init__(self, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)
        self.layers = [(torch.randn(64, 64, generator=draw) / 8).to(dtype) for _ in range(6)]
        self.first_row_for_all: tuple[str, ...] = ()

    def __call__(
        self, sample: Any, timestep: Any, encoder_hidden_states: Any
    ) -> tuple[torch.Tensor]:
        times, text = timestep.reshape(-1, 1).to(sample.dtype) / 1000, encoder_hidden_states.mean(1)
        if "timestep" in self.first_row_for_all:
            times = times[:1]
        if "encoder_hidden_states" in self.first_row_for_all:
            text = text[:1]
        hidden = sample
        for layer in self.layers:
            # As other numbers of rows round otherwise on a device that has kernels for each.
            hidden = (hidden.float() @ layer.float() * (1 + 1e-3 * (len(sample) - 1))).to(
                sample.dtype
            )
            hidden = torch.nn.functional.layer_norm(hidden, (64,)) + (times + text) / 60
        return (hidden,)


def calls_of(network: SmallNetwork, dtype: torch.dtype) -> list[Call]:
    calls, draw = [], torch.Generator().manual_seed(1)
    for time in (981.0, 661.0, 341.0):
        arguments = {
            "sample": torch.randn(2, 64, generator=draw).to(dtype),
            "timestep": torch.tensor(time),
            "encoder_hidden_states": torch.randn(2, 4, 64, generator=draw).to(dtype),
        }
        member = Member(lambda _: None, alone=False, key=None, outputs=(1,))
        call = Call(network, (), arguments, member, 0.0)
        call.describe(NAMES)
        call.output = network(**arguments)
        calls.append(call)
    return calls


def merged(network: SmallNetwork, calls: Sequence[Call]) -> list[Any]:
    rows = [call.rows for call in calls]
    return split(network(**merge([call.arguments for call in calls], rows)), rows, "tensor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_row_s_time_or_text_for_all_shows_in_any_type(dtype: torch.dtype):
    network = SmallNetwork(dtype)
    if dtype is torch.float32:  # there rounding is none of what is looked at here
        network.layers = network.layers[:1]
    calls = calls_of(network, dtype)
    assert worst_excess(calls, merged(network, calls), padded=False) <= 1
    for name in NAMES[1:]:
        network.first_row_for_all = (name,)
        parts = merged(network, calls)
        network.first_row_for_all = ()
        assert worst_excess(calls, parts, padded=False) > 1
        # A bound for any model of such a type lets it through.
        hidden = max(excess(part, call.output) for part, call in zip(parts, calls, strict=True)) < 1
        assert hidden is (dtype is not torch.float32)


def test_the_spread_is_that_of_all_tensors_together():
    made, expected = (
        (torch.tensor([3.0, 0.0]), [torch.tensor(4.0)]),
        (torch.zeros(2), [torch.tensor(5.0)]),
    )
    assert spread(made, expected) == pytest.approx((10 / 25) ** 0.5)
    assert excess(made, made) == spread(made, made) == 0


def test_only_coarse_types_have_steps_to_be_counted_in():
    assert step_of(torch.zeros(1)) is None
    assert step_of((torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16))) == 2**-7
    assert step_of([torch.zeros(1, dtype=torch.float16)]) == 2**-10
