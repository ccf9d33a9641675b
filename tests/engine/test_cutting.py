"""How one call of a denoiser is cut into several: merged again they are what was cut."""

from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from tests.engine.test_merging import call, listed
from workers.cutting import cut, even_counts, join
from workers.merging import Unmergeable, merge


@pytest.mark.parametrize(
    ("rows", "parts", "counts"),
    [(1, 2, [1]), (2, 2, [1, 1]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1])],
)
def test_rows_are_dealt_out_evenly_and_no_part_is_empty(rows: int, parts: int, counts: list[int]):
    assert even_counts(rows, parts) == counts


def equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "whole",
    [
        call(5, timestep=torch.arange(5.0)),
        call(5, added_cond_kwargs={"text_embeds": torch.arange(10.0).reshape(5, 2)}),
        call(5, timestep=torch.arange(5.0), img_ids=torch.rand(4, 3), txt_ids=torch.ones(5, 7, 3)),
        call(5, timestep=torch.arange(5.0), image_rotary_emb=(torch.rand(4, 3), torch.rand(4, 3))),
        call(5, timestep=torch.arange(5.0), img_shapes=[[(1, 4, 4)]] * 5),
        listed(5, 3),
    ],
    ids=["rows", "dict", "positions", "rotary", "alike", "lists"],
)
def test_what_is_cut_and_merged_is_as_it_was(whole: dict[str, Any]):
    parts = cut(whole, [2, 2, 1])
    assert [len(part.get("sample", part.get("x", ()))) for part in parts] == [2, 2, 1]
    if "sample" in whole and whole["timestep"].ndim == 0:
        parts = [{**part, "timestep": part["timestep"]} for part in parts]
        merged = merge(parts, [2, 2, 1])
        assert torch.equal(merged.pop("timestep"), whole["timestep"].expand(5))
        whole = {name: value for name, value in whole.items() if name != "timestep"}
        assert equal(merged, whole)
    else:
        assert equal(merge(parts, [2, 2, 1]), whole)


def test_one_time_for_all_rows_goes_to_each_part():
    parts = cut(call(4, timestep=torch.tensor([7.0])), [2, 2])
    assert all(torch.equal(part["timestep"], torch.tensor([7.0])) for part in parts)


def test_what_has_not_so_many_rows_is_not_cut():
    with pytest.raises(Unmergeable) as refused:
        cut(call(4, encoder_hidden_states=torch.ones(3, 7, 5)), [2, 2])
    assert refused.value.name == "encoder_hidden_states"


@pytest.mark.parametrize(
    "make",
    [lambda rows: rows, lambda rows: (rows, None), Transformer2DModelOutput],
    ids=["tensor", "tuple", "output"],
)
def test_outputs_are_joined_whatever_they_are_made_of(make: Any):
    joined = join([make(torch.ones(2, 3)), make(torch.zeros(1, 3))], [2, 1])
    rows = joined[0] if isinstance(joined, (tuple, dict)) else joined
    assert type(joined) is type(make(rows))
    assert rows.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]


def test_lists_of_samples_are_joined_as_lists():
    assert join([([torch.ones(1)] * 2,), ([torch.zeros(1)],)], [2, 1])[0][2].item() == 0


def test_outputs_with_other_rows_than_their_calls_are_not_joined():
    with pytest.raises(Unmergeable, match="output"):
        join([torch.ones(2, 3), torch.ones(2, 3)], [2, 1])
