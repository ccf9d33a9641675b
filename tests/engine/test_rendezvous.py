"""Who waits for whom at the rendezvous, and that nobody waits in vain. On a toy denoiser."""

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.engine.toy_denoiser import TIMEOUT_S, Gate, Requests, masked_mean
from tests.waiting import wait_until
from workers.engine.observer import Interrupted


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    yield requests
    requests.close()


@pytest.fixture
def proven(requests: Requests) -> Requests:
    """Has shared a forward before, so that the next group needs no proof."""
    for each in meet(requests, 1.0, 2.0, texts=[{}, {"first_time": 1.0}]):
        each.result(TIMEOUT_S)
    requests.denoiser.seen.clear()
    return requests


def have_come(requests: Requests, number: int):
    return requests.rendezvous.waiting == number


def meet(requests: Requests, *values: float, width: int = 3, keys: Any = None, texts: Any = None):
    """Have requests of these values call the denoiser at once; return what became of each."""
    gate = Gate()
    requests.denoiser.before = gate
    first = requests.start(width=1, alone=True)  # keeps the device while the others gather
    assert gate.reached.wait(TIMEOUT_S)
    keys = keys or [None] * len(values)
    texts = texts or [{}] * len(values)
    started = [
        requests.start(value=value, width=width, key=key, **text)
        for value, key, text in zip(values, keys, texts, strict=True)
    ]
    wait_until(lambda: requests.rendezvous.waiting == len(values), TIMEOUT_S, "the calls")
    requests.denoiser.before = lambda _: None
    gate.open()
    first.result(TIMEOUT_S)
    return started


def test_a_lone_request_waits_for_nobody(requests: Requests):
    started = time.monotonic()
    assert requests.start(calls=3).result(TIMEOUT_S).tolist() == [[4.0] * 3]
    assert time.monotonic() - started < TIMEOUT_S / 2
    assert requests.rendezvous.histogram == {1: 3}


@pytest.mark.parametrize("calls_first", [0, 1])
def test_nobody_waits_for_one_that_is_outside_its_loop(requests: Requests, calls_first: int):
    """Before its first call, and after it left, as a run does that decodes."""
    gate = Gate()

    def outside():
        with requests.rendezvous.member() as member:
            for _ in range(calls_first):
                requests.denoiser(torch.ones(1, 3), torch.tensor(0.0))
                member.leave()
            gate()

    other = requests.pool.submit(outside)
    assert gate.reached.wait(TIMEOUT_S)
    started = time.monotonic()
    requests.start(calls=2).result(TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S / 2
    gate.open()
    other.result(TIMEOUT_S)


def test_nobody_waits_for_one_whose_calls_are_of_another_kind(requests: Requests):
    gate = Gate()
    other = requests.start(calls=2, width=5, between=gate.at(1))
    assert gate.reached.wait(TIMEOUT_S)
    started = time.monotonic()
    requests.start(calls=2).result(TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S / 2
    gate.open()
    other.result(TIMEOUT_S)
    assert set(requests.denoiser.seen) == {1}


def test_waiting_is_bounded(requests: Requests):
    gate = Gate()
    requests.rendezvous.line.max_wait_s = 0.05
    late = requests.start(calls=2, between=gate.at(1))
    assert gate.reached.wait(TIMEOUT_S)
    assert requests.start(calls=2).result(TIMEOUT_S).tolist() == [[3.0] * 3]
    gate.open()
    late.result(TIMEOUT_S)


def test_those_that_meet_share_a_forward(proven: Requests):
    results = meet(proven, 1.0, 2.0, 3.0)
    assert [result.result(TIMEOUT_S)[0, 0].item() for result in results] == [2, 4, 6]
    assert proven.denoiser.seen == [1, 3]
    assert proven.rendezvous.histogram[3] == 1


def test_the_wait_counts_from_when_the_device_was_free(proven: Requests):
    """Else whoever queued behind a long forward is sent alone, for ever out of phase."""
    proven.rendezvous.line.max_wait_s = 0.4
    gate = Gate()
    proven.denoiser.before = gate
    first = proven.start(calls=2)
    assert gate.reached.wait(TIMEOUT_S)
    second = proven.start(calls=1)
    wait_until(lambda: proven.rendezvous.waiting == 1, TIMEOUT_S, "the second call")
    arrived = time.monotonic()
    wait_until(lambda: time.monotonic() - arrived > 0.5, TIMEOUT_S, "a long forward")
    gate.open()
    first.result(TIMEOUT_S)
    second.result(TIMEOUT_S)
    assert proven.denoiser.seen == [1, 2]


def test_the_first_in_line_goes_first_and_takes_its_like_along(requests: Requests):
    for width in (3, 5):
        for each in meet(requests, 1.0, 1.0, width=width):
            each.result(TIMEOUT_S)
    gate = Gate()
    requests.denoiser.seen.clear()
    requests.denoiser.before = gate
    waiting = [requests.start(width=1, alone=True)]
    assert gate.reached.wait(TIMEOUT_S)
    widths: list[int] = []
    for number, width in enumerate((5, 3, 5), start=1):
        waiting.append(requests.start(width=width))
        wait_until(partial(have_come, requests, number), TIMEOUT_S, "the call")
    requests.denoiser.before = lambda sample: widths.append(sample.shape[1])
    gate.open()
    for each in waiting:
        each.result(TIMEOUT_S)
    assert widths == [5, 3]
    assert requests.denoiser.seen == [1, 2, 1]


def test_one_that_asked_to_run_alone_never_merges(proven: Requests):
    gate = Gate()
    proven.denoiser.before = gate
    waiting = [proven.start(alone=True)]
    assert gate.reached.wait(TIMEOUT_S)
    waiting += [proven.start(calls=3, alone=True) for _ in range(3)]
    wait_until(lambda: proven.rendezvous.waiting == 3, TIMEOUT_S, "the calls")
    gate.open()
    for each in waiting:
        each.result(TIMEOUT_S)
    assert set(proven.denoiser.seen) == {1}


def test_one_that_is_interrupted_leaves_nobody_waiting(proven: Requests):
    gate = Gate()

    def stop(index: int):
        if index == 1:
            gate()
            raise Interrupted("canceled")

    stopped = proven.start(calls=5, between=stop)
    assert gate.reached.wait(TIMEOUT_S)
    other = proven.start(calls=2)
    wait_until(lambda: proven.rendezvous.waiting == 1, TIMEOUT_S, "the other to wait for it")
    started = time.monotonic()
    gate.open()
    assert other.result(TIMEOUT_S).tolist() == [[3.0] * 3]
    assert time.monotonic() - started < TIMEOUT_S / 2
    with pytest.raises(Interrupted):
        stopped.result(TIMEOUT_S)


def test_calls_of_different_keys_never_share_and_the_denoiser_is_set_to_each(proven: Requests):
    def switch(key: Any):
        assert proven.denoiser.busy == 0
        switched.append(key)
        proven.denoiser.make = lambda doubled: doubled + (key or 0)

    switched: list[Any] = []
    proven.rendezvous.switch = switch
    for _ in range(2):  # the first time each key is proven
        proven.denoiser.seen.clear()
        switched.clear()
        made = meet(proven, 1.0, 1.0, 1.0, 1.0, keys=(100, 200, 100, 200))
        assert [each.result(TIMEOUT_S)[0, 0].item() for each in made] == [102, 202, 102, 202]
    assert sorted(proven.denoiser.seen) == [1, 2, 2]
    assert switched in ([None, 100, 200], [None, 200, 100])


def test_a_denoiser_that_cannot_be_set_fails_those_that_need_it_so_and_nobody_else(
    proven: Requests,
):
    def switch(key: Any):
        if key == "broken":
            raise ValueError("no such adapter")

    proven.rendezvous.switch = switch
    good, bad = meet(proven, 1.0, 2.0, keys=("good", "broken"))
    assert good.result(TIMEOUT_S).tolist() == [[2.0] * 3]
    with pytest.raises(ValueError, match="no such adapter"):
        bad.result(TIMEOUT_S)
    assert proven.start(key="good").result(TIMEOUT_S).tolist() == [[2.0] * 3]


def poisoned(sample: torch.Tensor):
    if (sample > 100).any():
        raise ValueError("poisoned")


def test_only_the_culprit_of_a_failing_forward_fails(proven: Requests):
    proven.denoiser.make = lambda doubled: poisoned(doubled) or doubled
    good, bad, fine = meet(proven, 1.0, 200.0, 3.0)
    assert good.result(TIMEOUT_S).tolist() == [[2.0] * 3]
    assert fine.result(TIMEOUT_S).tolist() == [[6.0] * 3]
    with pytest.raises(ValueError, match="poisoned"):
        bad.result(TIMEOUT_S)
    assert proven.denoiser.seen == [1, 3, 1, 1, 1]
    meet(proven, 1.0, 2.0)[1].result(TIMEOUT_S)
    assert proven.denoiser.seen[-1] == 2


def test_too_little_memory_for_a_batch_makes_smaller_ones(proven: Requests):
    def scarce(doubled: torch.Tensor):
        if len(doubled) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return doubled

    proven.denoiser.make = scarce
    for result in meet(proven, 1.0, 2.0, 3.0):
        result.result(TIMEOUT_S)
    assert proven.denoiser.seen == [1, 3, 1, 1, 1]
    proven.denoiser.seen.clear()
    for result in meet(proven, 1.0, 2.0, 3.0):
        result.result(TIMEOUT_S)
    assert proven.denoiser.seen == [1, 2, 1]


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
        results = [each.result(TIMEOUT_S) for each in meet(requests, 1.0, 2.0, 3.0)]
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


def test_texts_of_different_lengths_share_a_forward_once_that_is_proven(requests: Requests):
    for seen in ([1, 3, 1, 1, 1], [1, 3]):
        requests.denoiser.seen.clear()
        made = meet(requests, 1.0, 1.0, 1.0, texts=[text(length) for length in (2, 7, 5)])
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
        made = meet(requests, 1.0, 1.0, 1.0, texts=[text(length) for length in lengths])
        assert [each.result(TIMEOUT_S)[0, 0].item() for each in made] == [4, 9, 9]
        assert sorted(requests.denoiser.seen) == sorted(seen)
    assert caplog.text.count(why) == 1


@pytest.mark.parametrize("reads_all", [True, False])
def test_what_all_calls_had_in_common_is_proven_anew_once_they_differ_in_it(
    requests: Requests, caplog: pytest.LogCaptureFixture, reads_all: bool
):
    """One that reads the time of the first row for all is right while all are at one step."""

    def read(text: torch.Tensor, _: Any) -> torch.Tensor:
        return text[:, 0, :1] if reads_all else text[:1, 0, :1]

    requests.denoiser.read = read
    seen = []
    for times in ((0, 0), (5, 5), (5, 7), (3, 7)):
        texts = [{"encoder_hidden_states": torch.full((1, 1, 4), float(time))} for time in times]
        made = meet(requests, 1.0, 2.0, texts=texts)
        results = [each.result(TIMEOUT_S)[0, 0].item() for each in made]
        assert results == [2 + times[0], 4 + times[1]]
        seen.append(requests.denoiser.seen[1:])
        requests.denoiser.seen.clear()
    together, proof, apart = [2], [2, 1, 1], [1, 1]
    if reads_all:
        assert seen == [proof, together, proof, together]
    else:
        assert seen == [proof, together, proof, apart]
    assert ("are not shared" in caplog.text) is not reads_all


def test_texts_of_different_lengths_without_a_mask_run_alone(requests: Requests):
    texts = [{"encoder_hidden_states": torch.ones(1, length, 4)} for length in (2, 7)]
    for each in meet(requests, 1.0, 1.0, texts=texts):
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


def test_calls_outside_any_request_pass_through(requests: Requests):
    output = requests.denoiser(torch.ones(2, 3), torch.tensor(1.0))[0]
    assert output.tolist() == [[3.0] * 3] * 2
    assert requests.rendezvous.histogram == {}
