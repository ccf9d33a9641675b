"""Arguments of families that are laid out in ways of their own: merged, cut and checked by name."""

from typing import Any

import pytest
import torch

from workers.sharing.checks import new_differences
from workers.sharing.merging import Unmergeable, choose_rows, layout, merge

FRAMES = 4


def by_rows(*shape: int) -> Any:
    """Makes a tensor with a row for each sample, each of its own number."""
    return lambda rows, first: (
        torch.arange(first, first + rows)
        .float()
        .reshape(-1, *([1] * len(shape)))
        .expand(-1, *shape)
    )


def frames_of(rows: int, first: int) -> Any:
    return by_rows(5, 6)(rows, first).repeat_interleave(FRAMES, dim=0)


def layers_first(rows: int, first: int) -> Any:
    return by_rows(5, 6)(rows, first).expand(3, -1, -1, -1)


def layers_listed(rows: int, first: int) -> Any:
    return [by_rows(5, 6)(rows, first) + layer for layer in range(2)]


OWN_WAYS = {
    ("AnimateDiff", "encoder_hidden_states"): frames_of,
    ("HiDream", "encoder_hidden_states_llama3"): layers_first,
    ("Bria Fibo", "text_encoder_layers"): layers_listed,
    ("HiDream", "pooled_embeds"): by_rows(6),
    ("GLM-Image", "prior_token_id"): by_rows(7),
    ("EasyAnimate", "inpaint_latents"): by_rows(4, 2, 8, 8),
    ("LTX", "video_coords"): by_rows(3, 9),
    ("Helios", "latents_history_short"): by_rows(4, 2, 8, 8),
    ("LTX-2", "audio_hidden_states"): by_rows(9, 6),
    ("OmniGen", "input_img_latents"): lambda *_: [],
}
SHARED = {
    ("Kandinsky 5", "visual_rope_pos"): [torch.arange(2), torch.arange(3)],
    ("Kandinsky 5", "scale_factor"): (1.0, 2.0, 2.0),
    ("Cosmos", "padding_mask"): torch.ones(1, 1, 8, 8),
    ("LTX-2", "spatio_temporal_guidance_blocks"): [3, 5],
    ("CogVideoX", "ofs"): torch.full((1,), 2.0),
    ("Helios", "indices_hidden_states"): torch.arange(5).unsqueeze(0),
    ("Krea 2", "position_ids"): torch.arange(6).reshape(2, 3),
    ("Lumina", "image_rotary_emb"): torch.ones(2, 2, 4),
}


def call(rows: int, **more: Any) -> dict[str, Any]:
    """A call for videos; `rows` are as many as there are frames, to mislead."""
    return {"hidden_states": torch.zeros(rows, 4, FRAMES, 8, 8), "timestep": torch.ones(1), **more}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else one == other


@pytest.mark.parametrize(("family", "name"), OWN_WAYS)
def test_what_has_rows_in_a_way_of_its_own_is_merged_and_cut_by_them(family: str, name: str):
    make = OWN_WAYS[family, name]
    calls = [call(2, **{name: make(2, 0)}), call(3, **{name: make(3, 2)})]
    assert layout(calls[0]).signature == layout(calls[1]).signature
    merged = merge(calls, [2, 3])
    assert same(merged[name], make(5, 0))
    for chosen, first in ([0, 1], 0), ([2, 3, 4], 2):
        assert same(choose_rows(merged, chosen, 5)[name], make(len(chosen), first))


@pytest.mark.parametrize(
    ("family", "name"), [key for key in OWN_WAYS if key[1] != "input_img_latents"]
)
def test_a_check_speaks_for_the_rows_in_which_calls_differ(family: str, name: str):
    make = OWN_WAYS[family, name]
    apart = merge([call(1, **{name: make(1, first)}) for first in (0, 1)], [1, 1])
    alike = merge([call(1, **{name: make(1, 0)}) for _ in range(2)], [1, 1])
    assert any(place[0].startswith(name) for place in new_differences(apart, [1, 1], ()).read())
    assert not new_differences(alike, [1, 1], ()).read()


@pytest.mark.parametrize(("family", "name"), SHARED)
def test_what_is_one_for_all_rows_stays_as_it_is(family: str, name: str):
    value = SHARED[family, name]
    calls = [call(2, **{name: value}), call(1, **{name: value})]
    assert layout(calls[0]).signature == layout(calls[1]).signature
    assert same(merge(calls, [2, 1])[name], value)
    assert same(choose_rows(calls[0], [1], 2)[name], value)


@pytest.mark.parametrize("name", ["padding_mask", "image_rotary_emb"])
def test_what_is_one_for_all_rows_must_be_equal(name: str):
    calls = [call(1, **{name: torch.full((1, 1, 2, 2), value)}) for value in (1.0, 2.0)]
    with pytest.raises(Unmergeable):
        merge(calls, [1, 1])


def test_texts_for_each_frame_need_the_frames_of_a_video():
    image = {
        "hidden_states": torch.zeros(2, 4, 8, 8),
        "encoder_hidden_states": torch.zeros(8, 5, 6),
    }
    with pytest.raises(Unmergeable):
        layout(image)
