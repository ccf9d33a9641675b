"""Where calls differ, row by row of each argument."""

from typing import Any

import torch

from workers.sharing.checks import new_differences


def test_each_row_of_each_argument_is_looked_at_by_itself():
    merged: dict[str, Any] = {
        "sample": torch.arange(4.0).reshape(4, 1),
        "encoder_hidden_states": torch.tensor([[0.0], [1.0], [0.0], [2.0]]),
        "added_cond_kwargs": {"time_ids": torch.zeros(4, 6), "text_embeds": torch.eye(4)},
        "x": [torch.zeros(2), torch.zeros(2), torch.ones(2), torch.zeros(2)],
        "img_ids": torch.arange(12.0).reshape(4, 3),
        "img_shapes": [1, 1, 1, 1],
        "return_dict": False,
    }
    found = new_differences(merged, [2, 2], {("sample", 1)}).read()
    assert found == {
        ("sample", 0),
        ("encoder_hidden_states", 1),
        ("added_cond_kwargs.text_embeds", 0),
        ("added_cond_kwargs.text_embeds", 1),
        ("x", 0),
    }


def test_calls_of_different_numbers_of_rows_are_compared_where_all_have_one():
    value = torch.tensor([1.0, 5.0, 1.0, 6.0, 7.0, 1.0])
    assert new_differences({"timestep": value}, [2, 3, 1], ()).read() == set()
    assert new_differences({"timestep": value}, [1, 3, 2], ()).read() == {("timestep", 0)}
    assert new_differences({"timestep": value[:5]}, [2, 3], ()).read() == {("timestep", 1)}
