"""A number that changes under the hands of whoever computes with it."""

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from workers.engine.features.guidance import RunningScale

ONES = torch.ones(2, 3)


def changed(first: float, *values: float) -> RunningScale:
    scale = RunningScale(first, len(values))
    for sample, value in enumerate(values):
        scale.set(slice(sample, sample + 1), value)
    return scale


@pytest.mark.parametrize(
    "compute",
    [
        lambda scale: scale * ONES,
        lambda scale: ONES * scale,
        lambda scale: ONES - scale,
        lambda scale: scale / (ONES + 1),
        lambda scale: (ONES * 2) ** scale,
        lambda scale: torch.lerp(ONES, ONES * 2, scale),
        lambda scale: torch.where(ONES > 0, ONES, scale) + 2 * scale * ONES,
        lambda scale: ONES.clone().mul_(scale),
        lambda scale: torch.tensor(scale - 1),
        lambda scale: torch.tensor((1 + scale) * 2 / scale - scale**2),
        lambda scale: torch.tensor(float(scale)),
    ],
)
def test_whatever_is_computed_with_it_is_computed_with_its_value_of_now(
    compute: Callable[[float], torch.Tensor],
):
    scale = changed(3.0, 5.0)
    with torch.inference_mode():
        assert torch.equal(compute(scale), compute(5.0))
        assert scale.used
        assert not scale.divided


def test_until_it_changes_it_is_a_float():
    scale: float = RunningScale(3)
    assert isinstance(scale, float)
    assert (scale, hash(scale), f"{scale:g}", type(scale + 0)) == (3.0, hash(3.0), "3", float)
    assert scale != 4.0
    assert bool(scale)
    assert not RunningScale(0.0)


@pytest.mark.parametrize("compare", [operator.gt, operator.ge, operator.lt, operator.le])
@pytest.mark.parametrize("turned", [False, True])
def test_what_was_decided_by_it_stays(compare: Callable[[Any, Any], bool], turned: bool):
    scale = RunningScale(3.0)
    answer = compare(1.0, scale) if turned else compare(scale, 1.0)
    assert scale.can_become(5.0)
    assert not scale.can_become(0.5)
    scale.values = [0.5]
    assert (compare(1.0, scale) if turned else compare(scale, 1.0)) == answer
    assert not scale.used


@pytest.mark.parametrize(
    "compute",
    [
        lambda scale: torch.full((2, 3), scale),
        lambda scale: torch.tensor([scale] * 2),
        lambda scale: torch.add(ONES, ONES, alpha=scale),
        lambda scale: torch.tensor(math.sqrt(scale)),
    ],
)
def test_what_cannot_see_the_change_does_not_count_as_use(
    compute: Callable[[float], torch.Tensor],
):
    scale = changed(3.0, 5.0)
    assert torch.equal(compute(scale), compute(3.0))
    assert not scale.used


def test_without_decisions_it_can_become_anything():
    assert RunningScale(3.0).can_become(0.0)
    off = RunningScale(1.0)
    assert not off > 1
    assert not off.can_become(3.0)
    assert off.can_become(0.5)


def test_each_row_is_computed_with_the_value_of_its_request():
    scale = changed(3.0, 5.0, 7.3)
    scale.samples = ONES.shape
    assert torch.equal(scale * ONES, torch.stack([ONES[0] * 5.0, ONES[1] * 7.3]))
    wide = torch.ones(2, 6, dtype=torch.bfloat16)  # noise and variance
    assert torch.equal(wide * scale, torch.stack([wide[0] * 5.0, wide[1] * 7.3]))
    assert scale.used
    assert not scale.divided


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(lambda scale: scale * ONES[0], id="another number of rows"),
        pytest.param(lambda scale: scale * ONES[:, :2], id="parts of samples, as many as requests"),
        pytest.param(lambda scale: ONES.clone().mul_(scale), id="in place"),
        pytest.param(lambda scale: torch.mul(ONES, scale, out=torch.empty(2, 3)), id="given room"),
        pytest.param(lambda scale: torch.tensor(scale + 1), id="a number"),
    ],
)
def test_where_rows_cannot_have_their_own_they_are_computed_as_at_first(
    compute: Callable[[float], torch.Tensor],
):
    scale = changed(3.0, 3.0, 7.0)
    scale.samples = ONES.shape
    assert torch.equal(compute(scale), compute(3.0))
    assert scale.divided


def test_nothing_is_a_row_before_the_samples_are_known():
    scale = changed(3.0, 3.0, 7.0)
    assert torch.equal(scale * ONES, 3.0 * ONES)
    assert scale.divided
