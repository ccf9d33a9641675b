"""The denoisers that are measured on GPUs are those of their models, and their calls fit."""

import pytest
import torch

from scripts.lab.bench_denoisers import DENOISERS

NOWHERE = torch.device("meta")


@pytest.mark.parametrize(
    ("name", "billions", "shape"),
    [
        ("SDXL", 2.567, (1, 4, 128, 128)),
        ("FLUX.1", 11.901, (1, 4096, 64)),
        ("Wan-1.3B", 1.419, (1, 16, 21, 60, 104)),
        ("Wan-14B", 14.288, (1, 16, 21, 60, 104)),
    ],
)
def test_real_denoisers_have_the_published_sizes_and_take_their_calls(
    name: str, billions: float, shape: tuple[int, ...]
):
    spec = DENOISERS["real"][name]
    made = spec.make(NOWHERE, torch.bfloat16)
    weights = list(made.parameters())
    assert round(sum(each.numel() for each in weights) / 1e9, 3) == billions
    assert {each.dtype for each in weights} == {torch.bfloat16}
    with torch.inference_mode():
        output = made(**spec.arguments(1, NOWHERE, torch.bfloat16))[0]
    assert output.shape == shape
