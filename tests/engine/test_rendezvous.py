"""Who waits for whom at the rendezvous, and that nobody waits in vain. On a toy denoiser."""

import time
from functools import partial
from typing import Any

import pytest
import torch

from tests.engine.toy_denoiser import TIMEOUT_S, Gate, Requests
from tests.waiting import wait_until
from workers.engine.progress import Interrupted

UNWAITED_S = TIMEOUT_S / 2  # whoever waits at a rendezvous of the toy waits for all of TIMEOUT_S


def have_come(requests: Requests, number: int):
    return requests.rendezvous.waiting == number


def test_a_lone_request_waits_for_nobody(requests: Requests):
    assert requests.start(calls=3).result(UNWAITED_S).tolist() == [[4.0] * 3]
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
    requests.start(calls=2).result(UNWAITED_S)
    gate.open()
    other.result(TIMEOUT_S)


def test_nobody_waits_for_one_whose_calls_are_of_another_kind(requests: Requests):
    gate = Gate()
    other = requests.start(calls=2, width=5, between=gate.at(1))
    assert gate.reached.wait(TIMEOUT_S)
    requests.start(calls=2).result(UNWAITED_S)
    gate.open()
    other.result(TIMEOUT_S)
    assert set(requests.denoiser.seen) == {1}


def test_waiting_is_bounded(requests: Requests):
    gate = Gate()
    requests.rendezvous.queue.max_wait_s = 0.05
    late = requests.start(calls=2, between=gate.at(1))
    assert gate.reached.wait(TIMEOUT_S)
    assert requests.start(calls=2).result(TIMEOUT_S).tolist() == [[3.0] * 3]
    gate.open()
    late.result(TIMEOUT_S)


def test_those_that_meet_share_a_forward(checked: Requests):
    results = checked.meet(1.0, 2.0, 3.0)
    assert [result.result(TIMEOUT_S)[0, 0].item() for result in results] == [2, 4, 6]
    assert checked.denoiser.seen == [1, 3]
    assert checked.rendezvous.histogram[3] == 1


def test_the_wait_counts_from_when_the_device_was_free(checked: Requests):
    """Else whoever queued behind a long forward is sent alone, for ever out of phase."""
    checked.rendezvous.queue.max_wait_s = 0.4
    gate = Gate()
    checked.denoiser.before = gate
    first = checked.start(calls=2)
    assert gate.reached.wait(TIMEOUT_S)
    second = checked.start(calls=1)
    wait_until(lambda: checked.rendezvous.waiting == 1, TIMEOUT_S, "the second call")
    arrived = time.monotonic()
    wait_until(lambda: time.monotonic() - arrived > 0.5, TIMEOUT_S, "a long forward")
    gate.open()
    first.result(TIMEOUT_S)
    second.result(TIMEOUT_S)
    assert checked.denoiser.seen == [1, 2]


def test_the_first_in_line_goes_first_and_takes_its_like_along(requests: Requests):
    for width in (3, 5):
        for each in requests.meet(1.0, 1.0, width=width):
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


def test_one_that_asked_to_run_alone_never_merges(checked: Requests):
    gate = Gate()
    checked.denoiser.before = gate
    waiting = [checked.start(alone=True)]
    assert gate.reached.wait(TIMEOUT_S)
    waiting += [checked.start(calls=3, alone=True) for _ in range(3)]
    wait_until(lambda: checked.rendezvous.waiting == 3, TIMEOUT_S, "the calls")
    gate.open()
    for each in waiting:
        each.result(TIMEOUT_S)
    assert set(checked.denoiser.seen) == {1}


def test_one_that_is_interrupted_leaves_nobody_waiting(checked: Requests):
    gate = Gate()

    def stop(index: int):
        if index == 1:
            gate()
            raise Interrupted("canceled")

    stopped = checked.start(calls=5, between=stop)
    assert gate.reached.wait(TIMEOUT_S)
    other = checked.start(calls=2)
    wait_until(lambda: checked.rendezvous.waiting == 1, TIMEOUT_S, "the other to wait for it")
    gate.open()
    assert other.result(UNWAITED_S).tolist() == [[3.0] * 3]
    with pytest.raises(Interrupted):
        stopped.result(TIMEOUT_S)


def test_calls_of_different_keys_never_share_and_the_denoiser_is_set_to_each(checked: Requests):
    def switch(key: Any):
        assert checked.denoiser.busy == 0
        switched.append(key)
        checked.denoiser.make = lambda doubled: doubled + (key or 0)

    switched: list[Any] = []
    checked.rendezvous.switch = switch
    for _ in range(2):  # the first time each key is checked
        checked.denoiser.seen.clear()
        switched.clear()
        made = checked.meet(1.0, 1.0, 1.0, 1.0, keys=(100, 200, 100, 200))
        assert [each.result(TIMEOUT_S)[0, 0].item() for each in made] == [102, 202, 102, 202]
    assert sorted(checked.denoiser.seen) == [1, 2, 2]
    assert switched in ([None, 100, 200], [None, 200, 100])


def test_a_denoiser_that_cannot_be_set_fails_those_that_need_it_so_and_nobody_else(
    checked: Requests,
):
    def switch(key: Any):
        if key == "broken":
            raise ValueError("no such adapter")

    checked.rendezvous.switch = switch
    good, bad = checked.meet(1.0, 2.0, keys=("good", "broken"))
    assert good.result(TIMEOUT_S).tolist() == [[2.0] * 3]
    with pytest.raises(ValueError, match="no such adapter"):
        bad.result(TIMEOUT_S)
    assert checked.start(key="good").result(TIMEOUT_S).tolist() == [[2.0] * 3]


def test_calls_outside_any_request_pass_through(requests: Requests):
    output = requests.denoiser(torch.ones(2, 3), torch.tensor(1.0))[0]
    assert output.tolist() == [[3.0] * 3] * 2
    assert requests.rendezvous.histogram == {}
