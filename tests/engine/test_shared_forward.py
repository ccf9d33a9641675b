"""Which calls share a forward, how that is checked, and whom failures hit. On a toy denoiser."""

import logging
from typing import Any

import pytest
import torch

from tests.engine.toy_denoiser import TIMEOUT_S, Gate, Requests, masked_mean


def poisoned(sample: torch.Tensor):
    if (sample > 100).any():
        raise ValueError("poisoned")


def test_only_the_culprit_of_a_failing_forward_fails(checked: Requests):
    checked.denoiser.make = lambda doubled: poisoned(doubled) or doubled
    good, bad, fine = checked.meet(1.0, 200.0, 3.0)
    assert good.result(TIMEOUT_S).tolist() == [[2.0] * 3]
    assert fine.result(TIMEOUT_S).tolist() == [[6.0] * 3]
    with pytest.raises(ValueError, match="poisoned"):
        bad.result(TIMEOUT_S)
    assert checked.denoiser.seen == [1, 3, 1, 1, 1]
    checked.meet(1.0, 2.0)[1].result(TIMEOUT_S)
    assert checked.denoiser.seen[-1] == 2


def test_too_little_memory_for_a_batch_makes_smaller_ones(checked: Requests):
    def scarce(doubled: torch.Tensor):
        if len(doubled) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return doubled

    checked.denoiser.make = scarce
    for result in checked.meet(1.0, 2.0, 3.0):
        result.result(TIMEOUT_S)
    assert checked.denoiser.seen == [1, 3, 1, 1, 1]
    checked.denoiser.seen.clear()
    for result in checked.meet(1.0, 2.0, 3.0):
        result.result(TIMEOUT_S)
    assert checked.denoiser.seen == [1, 2, 1]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda doubled: doubled - doubled.mean(0), "as much as rounding may"),
        (lambda doubled: doubled.sum(), "output: no rule"),
        (lambda doubled: doubled if len(doubled) == 1 else 1 / 0, "3 calls together failed"),
    ],
    ids=["mixes its rows", "has no rows", "cannot do batches"],
)
def test_a_denoiser_that_cannot_be_merged_is_found_out_and_left_alone(
    requests: Requests, caplog: pytest.LogCaptureFixture, make: Any, why: str
):
    expected = [make(torch.full((1, 3), 2 * value)) for value in (1.0, 2.0, 3.0)]
    requests.denoiser.make = make
    for _ in range(2):
        results = [each.result(TIMEOUT_S) for each in requests.meet(1.0, 2.0, 3.0)]
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result, right)
    # Once together and then one by one, and the second time at once one by one.
    assert requests.denoiser.seen == [1, 3, 1, 1, 1, 1, 1, 1, 1]
    assert caplog.text.count(why) == 1


def text(length: int):
    """A text whose entries are as large as it is long; all of it counts."""
    return {
        "encoder_hidden_states": torch.full((1, length, 4), float(length)),
        "encoder_hidden_states_mask": None,
    }


def test_texts_of_different_lengths_share_a_forward_once_that_is_checked(requests: Requests):
    for seen in ([1, 3, 1, 1, 1], [1, 3]):
        requests.denoiser.seen.clear()
        made = requests.meet(1.0, 1.0, 1.0, texts=[text(length) for length in (2, 7, 5)])
        assert [each.result(TIMEOUT_S)[0, 0].item() for each in made] == [4, 9, 7]
        assert requests.denoiser.seen == seen


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (lambda text, _: text.mean((1, 2))[:, None], "with texts of different lengths are not"),
        (lambda text, mask: masked_mean(text, mask) if mask is None else 1 / 0, "together failed"),
    ],
    ids=["ignores its mask", "takes no mask"],
)
def test_a_denoiser_that_is_wrong_with_padding_shares_forwards_of_one_length_alone(
    requests: Requests, caplog: pytest.LogCaptureFixture, read: Any, why: str
):
    requests.denoiser.read = read
    lengths = (2, 7, 7)
    for seen in ([1, 3, 1, 1, 1], [1, 1, 2, 1, 1], [1, 1, 2]):
        requests.denoiser.seen.clear()
        made = requests.meet(1.0, 1.0, 1.0, texts=[text(length) for length in lengths])
        assert [each.result(TIMEOUT_S)[0, 0].item() for each in made] == [4, 9, 9]
        assert sorted(requests.denoiser.seen) == sorted(seen)
    assert caplog.text.count(why) == 1


@pytest.mark.parametrize("reads_all", [True, False])
def test_what_all_calls_had_in_common_is_checked_anew_once_they_differ_in_it(
    requests: Requests, caplog: pytest.LogCaptureFixture, reads_all: bool
):
    """One that reads the time of the first row for all is right while all are at one step."""

    def read(text: torch.Tensor, _: Any) -> torch.Tensor:
        return text[:, 0, :1] if reads_all else text[:1, 0, :1]

    requests.denoiser.read = read
    seen = []
    for times in ((0, 0), (5, 5), (5, 7), (3, 7)):
        texts = [{"encoder_hidden_states": torch.full((1, 1, 4), float(time))} for time in times]
        made = requests.meet(1.0, 2.0, texts=texts)
        results = [each.result(TIMEOUT_S)[0, 0].item() for each in made]
        assert results == [2 + times[0], 4 + times[1]]
        seen.append(requests.denoiser.seen[1:])
        requests.denoiser.seen.clear()
    together, check, apart = [2], [2, 1, 1], [1, 1]
    if reads_all:
        assert seen == [check, together, check, together]
    else:
        assert seen == [check, together, check, apart]
    assert ("are not shared" in caplog.text) is not reads_all


def test_texts_of_different_lengths_without_a_mask_run_alone(requests: Requests):
    texts = [{"encoder_hidden_states": torch.ones(1, length, 4)} for length in (2, 7)]
    for each in requests.meet(1.0, 1.0, texts=texts):
        assert each.result(TIMEOUT_S)[0, 0].item() == 3
    assert requests.denoiser.seen == [1, 1, 1]


def test_an_argument_without_a_rule_runs_alone_with_one_warning(
    requests: Requests, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    gate = Gate()
    requests.denoiser.before = gate
    waiting = [requests.start(new_condition=torch.zeros(1))]
    assert gate.reached.wait(TIMEOUT_S)
    waiting += [requests.start(calls=3, new_condition=torch.zeros(1)) for _ in range(2)]
    gate.open()
    for each in waiting:
        each.result(TIMEOUT_S)
    assert set(requests.denoiser.seen) == {1}
    assert caplog.text.count("new_condition: no rule") == 1


def test_a_call_that_does_not_fit_the_denoiser_fails_as_it_would_without(requests: Requests):
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        requests.start(colour="red").result(TIMEOUT_S)
