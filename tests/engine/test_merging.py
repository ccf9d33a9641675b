"""How arguments of a denoiser merge: each rule, and above all what is not merged."""

from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from workers.sharing.checks import excess
from workers.sharing.merging import Unmergeable, layout, merge, split


def call(rows: int = 2, seed: int = 0, **changes: Any) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(seed)
    usual = {
        "sample": torch.randn(rows, 4, 8, 8, generator=noise),
        "timestep": torch.tensor(10 + seed),
        "encoder_hidden_states": torch.randn(rows, 7, 5, generator=noise),
        "return_dict": False,
    }
    return {**usual, **changes}


def listed(rows: int, words: int, channels: int = 16) -> dict[str, Any]:
    """A call in the form of Z-Image: one tensor for each sample, texts of any length."""
    return {
        "x": [torch.full((channels, 1, 4, 4), float(row)) for row in range(rows)],
        "t": torch.full((rows,), 0.5),
        "cap_feats": [torch.ones(words + row, 5) for row in range(rows)],
    }


def signature(arguments: dict[str, Any]):
    return layout(arguments).signature


def test_tensors_are_put_one_behind_the_other_and_come_back():
    one, other = call(2, 1), call(3, 2)
    assert signature(one) == signature(other)
    merged = merge([one, other], [2, 3])
    assert torch.equal(merged["sample"], torch.cat([one["sample"], other["sample"]]))
    assert merged["return_dict"] is False
    parts = split((merged["sample"], None), [2, 3], "tensor")
    assert torch.equal(parts[0][0], one["sample"])
    assert torch.equal(parts[1][0], other["sample"])
    assert parts[1][1] is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(7.0), torch.tensor(9.0)),
        (torch.tensor([7.0]), torch.tensor([9.0, 9.0, 9.0])),
        (torch.tensor([7.0, 7.0]), torch.tensor(9.0)),
        (torch.tensor(7), torch.tensor(9.0)),
    ],
)
def test_times_become_one_for_each_row(one: torch.Tensor, other: torch.Tensor):
    calls = [call(2, timestep=one), call(3, timestep=other)]
    assert signature(calls[0]) == signature(calls[1])
    assert merge(calls, [2, 3])["timestep"].tolist() == [7, 7, 9, 9, 9]


def test_coarse_times_do_not_meet_whole_ones():
    coarse = call(timestep=torch.tensor(1000, dtype=torch.bfloat16))
    assert signature(coarse) != signature(call(timestep=torch.tensor(999)))


def test_a_time_for_each_token_goes_by_row():
    calls = [call(2, timestep=torch.full((2, 6), 7.0)), call(1, timestep=torch.full((1, 6), 9.0))]
    assert signature(calls[0]) == signature(calls[1])
    assert merge(calls, [2, 1])["timestep"].shape == (3, 6)


def test_dictionaries_merge_by_their_own_names():
    calls = [
        call(rows, added_cond_kwargs={"text_embeds": torch.full((rows, 3), 1.0 * rows)})
        for rows in (1, 2)
    ]
    assert signature(calls[0]) == signature(calls[1])
    merged = merge(calls, [1, 2])["added_cond_kwargs"]["text_embeds"]
    assert merged[:, 0].tolist() == [1, 2, 2]


def test_lists_of_samples_merge_with_texts_of_different_lengths():
    calls = [listed(1, 3), listed(2, 6)]
    assert signature(calls[0]) == signature(calls[1])
    merged = merge(calls, [1, 2])
    assert [len(text) for text in merged["cap_feats"]] == [3, 6, 7]
    assert merged["t"].shape == (3,)
    parts = split((merged["x"],), [1, 2], "list")
    assert [len(part[0]) for part in parts] == [1, 2]
    assert parts[1][0][1] is merged["x"][2]


def test_a_batch_as_large_as_the_channels_are_many_is_split_by_the_form_of_the_input():
    calls = [listed(8, 3) for _ in range(2)]
    merged = merge(calls, [8, 8])
    assert len(merged["x"]) == merged["x"][0].shape[0] == 16
    parts = split((merged["x"],), [8, 8], "list")
    assert [tuple(part[0][0].shape) for part in parts] == [(16, 1, 4, 4)] * 2
    with pytest.raises(Unmergeable):
        split((merged["x"][0],), [8, 8], "list")
    with pytest.raises(Unmergeable):
        split((merged["x"],), [8, 8], "tensor")


@pytest.mark.parametrize("name", ["img_ids", "txt_ids", "image_rotary_emb"])
def test_positions_must_be_equal_even_where_they_look_like_a_batch(name: str):
    ids = torch.arange(6.0).reshape(2, 3)
    calls = [call(2, seed, **{name: ids.clone()}) for seed in (1, 2)]
    assert signature(calls[0]) == signature(calls[1])
    assert torch.equal(merge(calls, [2, 2])[name], ids)
    calls[1][name] = ids + 1
    with pytest.raises(Unmergeable):
        merge(calls, [2, 2])


def test_positions_with_a_row_for_each_sample_must_be_equal_in_every_row():
    calls = [call(rows, img_ids=torch.ones(rows, 6, 4)) for rows in (1, 2)]
    assert signature(calls[0]) == signature(calls[1])
    assert merge(calls, [1, 2])["img_ids"].shape == (3, 6, 4)
    calls[1]["img_ids"] = calls[1]["img_ids"].clone()
    calls[1]["img_ids"][1, 0, 0] = 2
    with pytest.raises(Unmergeable):
        merge(calls, [1, 2])


def test_pairs_of_rotations_are_shared():
    rotations = (torch.ones(6, 4), torch.zeros(6, 4))
    calls = [call(1, image_rotary_emb=rotations), call(1, image_rotary_emb=rotations)]
    assert torch.equal(merge(calls, [1, 1])["image_rotary_emb"][1], rotations[1])


def test_shapes_for_each_row_are_repeated_and_others_do_not_meet():
    calls = [call(rows, img_shapes=[[(1, 4, 4)]] * rows) for rows in (1, 2)]
    assert merge(calls, [1, 2])["img_shapes"] == [[(1, 4, 4)]] * 3
    assert signature(calls[0]) != signature(call(1, img_shapes=[[(1, 4, 6)]]))
    with pytest.raises(Unmergeable, match="img_shapes"):
        layout(call(2, img_shapes=[[(1, 4, 4)], [(1, 4, 6)]]))


def texted(length: int, mask: torch.Tensor | None, rows: int = 1) -> dict[str, Any]:
    text = torch.full((rows, length, 5), float(length))
    return call(rows, encoder_hidden_states=text, encoder_hidden_states_mask=mask)


def test_texts_of_different_lengths_become_as_long_as_the_longest_and_the_mask_says_so():
    calls = [texted(3, None), texted(5, torch.tensor([[1, 1, 1, 1, 0]])), texted(4, None, rows=2)]
    assert len({signature(each) for each in calls}) == 1
    assert [layout(each).lengths for each in calls] == [(3,), (5,), (4,)]
    merged = merge(calls, [1, 1, 2])
    assert merged["encoder_hidden_states_mask"].tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
    ]
    assert merged["encoder_hidden_states_mask"].dtype == torch.int64
    assert merged["encoder_hidden_states"][:, :, 0].tolist() == [
        [3, 3, 3, 0, 0],
        [5, 5, 5, 5, 5],
        [4, 4, 4, 4, 0],
        [4, 4, 4, 4, 0],
    ]
    assert calls[0]["encoder_hidden_states_mask"] is None
    assert calls[0]["encoder_hidden_states"].shape == (1, 3, 5)


def test_texts_of_one_length_get_no_mask_that_none_of_them_had():
    assert merge([texted(3, None), texted(3, None)], [1, 1])["encoder_hidden_states_mask"] is None
    mixed = merge([texted(2, None), texted(2, torch.tensor([[True, False]]))], [1, 1])
    assert mixed["encoder_hidden_states_mask"].tolist() == [[True, True], [True, False]]


def test_where_no_text_has_a_mask_truth_values_say_what_is_padding():
    mask = merge([texted(1, None), texted(2, None)], [1, 1])["encoder_hidden_states_mask"]
    assert mask.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    "changes",
    [
        lambda n: {"encoder_hidden_states_mask": torch.ones(1, n)},  # fractions may be a bias
        lambda n: {"encoder_hidden_states_mask": torch.ones(1, 1, n, dtype=torch.int64)},
        lambda n: {"encoder_attention_mask": None},  # which of the two would be read?
        lambda n: {"encoder_hidden_states": torch.zeros(1, n, 2, 5)},
        lambda n: {"txt_ids": torch.zeros(n, 3)},
    ],
    ids=["a bias", "a mask of more dimensions", "two masks", "texts of layers", "positions"],
)
def test_a_text_whose_padding_no_mask_can_tell_is_never_made_longer(changes: Any):
    short, long = ({**texted(length, None), **changes(length)} for length in (3, 9))
    assert signature(short) != signature(long)


@pytest.mark.parametrize(
    "text", [torch.zeros(1, 9, 6), torch.zeros(1, 9, 5, dtype=torch.float16)], ids=["wide", "half"]
)
def test_texts_that_differ_in_more_than_length_do_not_meet(text: torch.Tensor):
    other = {**texted(9, None), "encoder_hidden_states": text}
    assert signature(texted(3, None)) != signature(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"sample": torch.zeros(2, 4, 8, 16)},
        {"sample": torch.zeros(2, 4, 8, 8, dtype=torch.float16)},
        {"encoder_hidden_states": torch.zeros(2, 9, 5)},  # padding needs a mask: not ours to do
        {"encoder_hidden_states": None},
        {"return_dict": True},
        {"timestep": 10},
        {"attention_kwargs": {"scale": 1.0}},
    ],
)
def test_what_differs_in_more_than_values_does_not_meet(changes: dict[str, Any]):
    assert signature(call()) != signature(call(**changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("new_condition", torch.zeros(2, 3)),
        ("new_condition", [torch.zeros(2, 3)]),
        ("new_condition", {"text_embeds": torch.zeros(2, 3)}),
        ("batch_size", 2),
        ("cross_attention_kwargs", {"gligen": {"boxes": torch.zeros(2, 3)}}),
        ("down_block_additional_residuals", (torch.zeros(2, 4, 8, 8),)),
        ("encoder_hidden_states", torch.zeros(3, 7, 5)),
        ("encoder_hidden_states", (torch.zeros(2, 7, 5), [torch.zeros(2, 1, 5)])),
        ("timestep", torch.zeros(3)),
        ("img_ids", torch.zeros(1, 2, 3, 4)),
        ("sample", torch.zeros(2)),
        ("sample", object()),
        ("attention_kwargs", {1: None, "scale": None}),  # which cannot be sorted
        ("img_shapes", [torch.zeros(3), torch.zeros(3)]),  # nor these be compared
    ],
)
def test_what_no_rule_fits_is_refused(name: str, value: Any):
    with pytest.raises(Unmergeable):
        layout(call(**{name: value}))


def test_an_empty_dictionary_and_nothing_are_nothing():
    assert layout(call(new_condition=None, joint_attention_kwargs={})).rows == 2


def test_list_and_tensor_inputs_are_not_mixed():
    with pytest.raises(Unmergeable, match="cap_feats"):
        layout({**listed(2, 3), "cap_feats": torch.zeros(2, 3, 5)})
    with pytest.raises(Unmergeable, match="x"):
        layout({**listed(1, 3), "x": [torch.zeros(4, 4), torch.zeros(4, 6)]})


@pytest.mark.parametrize("output", [torch.zeros(4, 3), torch.tensor(1.0), "text", [1, 2, 3]])
def test_an_output_without_the_rows_is_refused(output: Any):
    with pytest.raises(Unmergeable):
        split((output,), [1, 2], "tensor")


def test_named_outputs_keep_their_type():
    parts = split(Transformer2DModelOutput(sample=torch.arange(3)), [1, 2], "tensor")
    assert isinstance(parts[1], Transformer2DModelOutput)
    assert parts[1].sample.tolist() == [1, 2]


def test_rounding_is_told_from_being_wrong():
    exact = (torch.tensor([100.0, -3.0]), None)
    assert excess((torch.tensor([100.01, -3.0]), None), exact) < 1
    assert excess((torch.tensor([101.0, -3.0]), None), exact) > 1
    assert excess((torch.tensor([100.0]), None), exact) == float("inf")
    broken = (torch.tensor([float("nan"), 1.0]),)
    assert excess(broken, broken) == 0
