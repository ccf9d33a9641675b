"""A remembered layout is what looking anew would give, whatever changes from call to call."""

from typing import Any

import pytest
import torch

from workers.sharing.call import LayoutMemory
from workers.sharing.merging import Unmergeable, layout


def call(**changes: Any) -> dict[str, Any]:
    usual = {
        "sample": torch.zeros(2, 4, 8, 8),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": torch.zeros(2, 7, 5),
        "added_cond_kwargs": {"text_embeds": torch.zeros(2, 3)},
        "return_dict": False,
    }
    return {**usual, **changes}


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the numbers": {"sample": torch.ones(2, 4, 8, 8), "timestep": torch.tensor(9)},
    "the size": {"sample": torch.zeros(2, 4, 8, 16)},
    "the rows": {
        "sample": torch.zeros(3, 4, 8, 8),
        "encoder_hidden_states": torch.zeros(3, 7, 5),
        "added_cond_kwargs": {"text_embeds": torch.zeros(3, 3)},
    },
    "the type": {"sample": torch.zeros(2, 4, 8, 8, dtype=torch.bfloat16)},
    "the times' type": {"timestep": torch.tensor(10, dtype=torch.float16)},
    "the text's length": {"encoder_hidden_states": torch.zeros(2, 9, 5)},
    "a mask comes": {"encoder_attention_mask": torch.ones(2, 7, dtype=torch.bool)},
    "a mask of None": {"encoder_attention_mask": None},
    "inside a dictionary": {"added_cond_kwargs": {"text_embeds": torch.zeros(2, 4)}},
    "a name in a dictionary": {"added_cond_kwargs": {"time_ids": torch.zeros(2, 3)}},
    "an empty dictionary": {"added_cond_kwargs": {}},
    "True for False": {"return_dict": True},
    "0 for False": {"num_frames": 0},
    "False for 0": {"num_frames": False},
    "1.0 for 1": {"height": 1.0},
    "1 for 1.0": {"height": 1},
    "positions": {"img_ids": torch.zeros(16, 3)},
    "more positions": {"img_ids": torch.zeros(32, 3)},
    "shapes alike": {"img_shapes": [[(1, 4, 4)], [(1, 4, 4)]]},
    "shapes unlike": {"img_shapes": [[(1, 4, 4)], [(1, 4, 8)]]},
    "other shapes": {"img_shapes": [[(1, 8, 8)], [(1, 8, 8)]]},
    "an object": {"surprise": object()},
    "a list of samples": {"sample": [torch.zeros(4, 8, 8)] * 2},
}


def looked(memory: LayoutMemory, arguments: dict[str, Any]) -> Any:
    try:
        return memory.layout(arguments, layout)
    except Unmergeable as error:
        return error.name


@pytest.mark.parametrize("first", CHANGES)
def test_a_layout_is_what_it_would_be_without_memory(first: str):
    for second in CHANGES:
        memory = LayoutMemory()
        looked(memory, call(**CHANGES[first]))
        arguments = call(**CHANGES[second])
        assert looked(memory, arguments) == looked(LayoutMemory(), arguments), second


def test_a_call_that_looks_the_same_is_not_looked_through_again():
    memory, seen = LayoutMemory(), []

    def look(arguments: Any) -> Any:
        seen.append(arguments)
        return layout(arguments)

    first = memory.layout(call(), look)
    assert memory.layout(call(**CHANGES["the numbers"]), look) is first
    assert len(seen) == 1
    memory.layout(call(**CHANGES["the size"]), look)
    assert len(seen) == 2


def test_a_list_that_was_changed_in_place_is_looked_through_again():
    memory, shapes = LayoutMemory(), [[(1, 4, 4)], [(1, 4, 4)]]
    looked(memory, call(img_shapes=shapes))
    shapes[1] = [(1, 4, 8)]
    assert looked(memory, call(img_shapes=shapes)) == "img_shapes"
