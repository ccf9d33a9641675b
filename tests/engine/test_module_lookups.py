"""Noted parts and weights are found faster, and otherwise as torch finds them."""

import copy
from typing import Any

import pytest
import torch

from tests.engine.tiny_families import FAMILIES, picture_of
from workers.devices.chunk import denoisers
from workers.patches import note_places


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

    plain, names = picture_of(pipe), list(denoiser.state_dict())
    parts = dict(denoiser.named_modules())
    note_places(denoiser)
    note_places(denoiser)
    assert picture_of(pipe) == plain
    assert list(denoiser.state_dict()) == names
    assert dict(denoiser.named_modules()) == parts


def test_a_part_that_is_replaced_is_the_new_one():
    block = Block().eval()
    note_places(block)
    ones = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(ones.weight)
    torch.nn.init.zeros_(ones.bias)
    block.first = ones
    assert block.first is ones
    assert block(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


def test_parts_of_a_copy_are_its_own():
    block = Block().eval()
    note_places(block)
    theirs = copy.deepcopy(block)
    assert theirs.first is dict(theirs.named_children())["first"]
    assert theirs.first is not block.first
    torch.nn.init.zeros_(theirs.first.weight)
    torch.nn.init.zeros_(theirs.first.bias)
    assert theirs(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]
    assert block(torch.ones(1, 2)).tolist() != [[0.0, 0.0]]


def test_weights_that_change_are_the_new_ones():
    block = Block().eval()
    note_places(block)
    hidden = torch.ones(1, 2)
    block.first.weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    block.first.register_parameter("bias", torch.nn.Parameter(torch.tensor([0.5, 0.5])))
    assert block(hidden).tolist() == [[3.5, 7.5]]
    block.first.register_parameter("bias", None)
    assert block(hidden).tolist() == [[3.0, 7.0]]
    assert block.double()(hidden.double()).dtype == torch.float64


def test_hooks_of_a_layer_are_called():
    block = Block().eval()
    note_places(block)
    seen: list[Any] = []
    block.first.register_forward_hook(lambda *_: seen.append("after"))
    block.first.register_forward_pre_hook(lambda *_: seen.append("before"))
    block(torch.ones(1, 2))
    assert seen == ["before", "after"]


def test_what_the_class_has_of_that_name_comes_first():
    block = Block().eval()
    note_places(block)
    assert block.shown() == "the method"
    assert block.nothing is None


LAYERS: dict[str, tuple[torch.nn.Module, tuple[int, ...]]] = {
    "linear": (torch.nn.Linear(4, 4), (2, 4)),
    "linear without bias": (torch.nn.Linear(4, 4, bias=False), (2, 4)),
    "convolution": (torch.nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2), (1, 4, 6, 6)),
    "same size": (torch.nn.Conv2d(4, 4, 3, padding="same"), (1, 4, 6, 6)),
    "circular": (torch.nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (1, 4, 6, 6)),
    "layer norm": (torch.nn.LayerNorm(4, eps=0.1), (2, 4)),
    "layer norm without weights": (torch.nn.LayerNorm(4, elementwise_affine=False), (2, 4)),
    "group norm": (torch.nn.GroupNorm(2, 4, eps=0.1), (1, 4, 3)),
    "silu": (torch.nn.SiLU(), (2, 4)),
    "silu in place": (torch.nn.SiLU(inplace=True), (2, 4)),
    "dropout": (torch.nn.Dropout(0.5).eval(), (2, 4)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_gives_the_same_bytes_and_goes_by_what_is_put_on_it_later(kind: str):
    layer, shape = copy.deepcopy(LAYERS[kind])
    torch.manual_seed(0)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    sample = torch.randn(shape)
    expected = layer(sample.clone())
    note_places(layer)
    assert torch.equal(layer(sample.clone()), expected)
    assert torch.equal(layer(input=sample.clone()), expected)
    assert torch.equal(copy.deepcopy(layer)(sample.clone()), expected)

    hook = layer.register_forward_hook(lambda *_: "the hook's")
    assert layer(sample.clone()) == "the hook's"
    hook.remove()
    layer.forward = lambda *_, **__: "another's"
    assert layer(sample.clone()) == "another's"


def test_a_dropout_that_trains_drops():
    dropout = torch.nn.Dropout(1.0)
    note_places(dropout)
    assert not dropout(torch.ones(4)).any()
