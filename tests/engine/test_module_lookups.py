"""Noted parts are found faster, and otherwise as torch finds them."""

import copy
from typing import Any

import pytest
import torch

from tests.engine.tiny_families import FAMILIES
from workers.denoiser.module_lookups import note_parts
from workers.devices.device_chunk import denoisers


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.nothing = None
        self.rest = torch.nn.Dropout(0.5)
        self._modules["shown"] = torch.nn.Linear(2, 2)

    def shown(self) -> str:
        return "the method"

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.rest(self.first(hidden))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_denoiser_gives_the_same_bytes_and_has_the_same_weights(family: str):
    torch.manual_seed(0)
    pipe = FAMILIES[family]()
    pipe.set_progress_bar_config(disable=True)
    [denoiser] = denoisers(pipe).values()

    def picture() -> bytes:
        made = pipe(
            "a star",
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(3),
            output_type="np",
            height=64,
            width=64,
        )
        return bytes(made.images.tobytes())

    plain, names = picture(), list(denoiser.state_dict())
    parts = dict(denoiser.named_modules())
    note_parts(denoiser)
    note_parts(denoiser)
    assert picture() == plain
    assert list(denoiser.state_dict()) == names
    assert dict(denoiser.named_modules()) == parts


def test_a_part_that_is_replaced_is_the_new_one():
    block = Block().eval()
    note_parts(block)
    assert "first" in block.__dict__
    ones = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(ones.weight)
    torch.nn.init.zeros_(ones.bias)
    block.first = ones
    assert block.first is ones
    assert block(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


def test_parts_of_a_copy_are_its_own():
    block = Block().eval()
    note_parts(block)
    theirs = copy.deepcopy(block)
    assert theirs.first is theirs._modules["first"]
    assert theirs.first is not block.first


def test_what_the_class_has_of_that_name_comes_first():
    block = Block().eval()
    note_parts(block)
    assert block.shown() == "the method"
    assert block.nothing is None


def test_dropout_rests_only_where_there_is_no_training():
    served, trained = Block().eval(), Block().train()
    note_parts(served)
    note_parts(trained)
    hidden = torch.ones(64, 2)
    assert served.rest(hidden) is hidden
    assert (trained.rest(hidden) == 0).any()
