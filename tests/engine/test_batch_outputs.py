"""Batches of requests with several outputs: each output has rows of its own."""

from typing import Any

import numpy as np
import pytest
import torch

from configs.errors import NonFiniteOutput
from configs.parameters import IMAGE_TO_IMAGE, INPAINT, TEXT_TO_IMAGE, Parameters
from scripts.lab.family_trial import pixels
from tests.engine.batch_requests import OUTPUTS, TASKS, of_task, results, several_outputs
from tests.engine.batches import TIMEOUT_S, Batches, Canceler, Last, difference
from tests.engine.conftest import MakeParameters, plan
from tests.engine.recorder import Recorder, Steerer
from tests.engine.toy_denoiser import Gate
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted


@pytest.fixture
def asked(parameters: MakeParameters) -> list[Parameters]:
    return several_outputs(parameters)


@pytest.mark.parametrize("task", TASKS)
def test_requests_of_several_outputs_start_together_and_each_output_is_that_of_its_seed(
    batches: Batches, asked: list[Parameters], task: str
):
    asked, inputs = of_task(asked, task)
    alone = batches.alone(asked, inputs)
    watchers = [Recorder() for _ in asked]
    made = results(batches.start(asked, watchers, inputs))
    assert (batches.encoded, batches.decoded) == ([6, 6], [6])
    assert max(map(difference, made, alone)) <= 1
    for generation, each, own, watcher in zip(made, asked, inputs, watchers, strict=True):
        assert generation.batch_mean == 3
        assert generation.warnings == ()
        assert list(dict.fromkeys(watcher.calls))[1 - 7 :] == [(step, 6) for step in range(1, 7)]
        for index, seed in enumerate(each.seeds()):
            single = each.with_changes({"seed": seed, "num_outputs_per_prompt": 1})
            (expected,) = batches.alone([single], [own])
            assert np.abs(pixels(generation, index) - pixels(expected)).max() <= 1


@pytest.mark.parametrize(
    ("task", "who"),
    [(TEXT_TO_IMAGE, 0), (TEXT_TO_IMAGE, 2), (IMAGE_TO_IMAGE, 0), (INPAINT, 1), (INPAINT, 2)],
)
def test_one_that_is_canceled_takes_all_its_rows_along(
    batches: Batches,
    asked: list[Parameters],
    task: str,
    who: int,
    monkeypatch: pytest.MonkeyPatch,
):
    asked, inputs = of_task(asked, task)
    alone = batches.alone(asked, inputs)
    rows = batches.count_rows(monkeypatch)
    gate = Gate()
    watchers: list[Any] = [Last(gate) for _ in asked]
    watchers[who] = Canceler(at=2)
    made = batches.start(asked, watchers, inputs)
    with pytest.raises(Interrupted):
        made[who].result(TIMEOUT_S)
    gate.open()
    stayed = [index for index in range(3) if index != who]
    for index in stayed:
        assert difference(made[index].result(TIMEOUT_S), alone[index]) <= 1
    outputs = sum(OUTPUTS[index] for index in stayed)
    assert batches.decoded == [outputs]
    assert sum(rows) == 2 * (6 * outputs + 2 * OUTPUTS[who])


def test_one_output_of_nan_fails_its_request_and_no_other(
    batches: Batches, asked: list[Parameters], monkeypatch: pytest.MonkeyPatch
):
    alone = batches.alone(asked)
    batches.spoil(monkeypatch, row=4, of=6)
    made = batches.start(asked, [Recorder() for _ in asked])
    with pytest.raises(NonFiniteOutput):
        made[2].result(TIMEOUT_S)
    assert max(map(difference, results(made[:2]), alone[:2])) <= 1
    assert batches.decoded == [3]


def test_what_the_memory_does_not_hold_runs_by_parts_that_cut_no_request(
    asked: list[Parameters], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    batches = Batches(load_pipeline(plan()))
    alone = batches.alone(asked)
    rows: list[int] = []
    forward = batches.pipe.unet.conv_in.forward

    def scarce(sample: torch.Tensor):
        if len(sample) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        rows.append(len(sample))
        return forward(sample)

    monkeypatch.setattr(batches.pipe.unet.conv_in, "forward", scarce)
    made = results(batches.start(asked, [Recorder() for _ in asked]))
    batches.pool.shutdown()
    assert max(map(difference, made, alone)) <= 1
    assert "need too much memory" in caplog.text or "failed, each runs alone" in caplog.text
    # Two outputs and one, and three, each with and without guidance.
    assert rows[-2:] == [6, 6]
    assert batches.decoded == [6]


def test_each_sees_how_its_own_first_output_looks(batches: Batches, asked: list[Parameters]):
    asked = [each.with_changes({"preview": index > 0}) for index, each in enumerate(asked)]
    alone = [Recorder(preview=True) for _ in asked]
    for each, watcher in zip(asked, alone, strict=True):
        batches.engine.generate(each, watcher)
    batches.encoded.clear()
    together = [Recorder(preview=True) for _ in asked]
    results(batches.start(asked, together))
    assert batches.encoded == [6, 6]
    for one, other in zip(alone, together, strict=True):
        assert [step for step, _ in other.previews] == [step for step, _ in one.previews]
        shown = [np.asarray(watcher.previews[-1][1]).astype(int) for watcher in (one, other)]
        # What was learnt in between moves the map a little.
        assert np.abs(shown[0] - shown[1]).mean() < 4


def test_guidance_of_one_with_several_outputs_changes_where_it_would_have(
    batches: Batches, asked: list[Parameters]
):
    alone = batches.alone(asked)
    steered = batches.engine.generate(asked[0], Steerer(3, guidance_scale=8.0))
    assert difference(steered, alone[0]) > 8
    alone[0] = steered
    batches.encoded.clear()
    made = results(batches.start(asked, [Steerer(3, guidance_scale=8.0), Recorder(), Recorder()]))
    assert max(map(difference, made, alone)) <= 1
    assert (made[0].steps, made[0].warnings) == (6, ())
    assert batches.encoded == [6, 6]


def test_no_more_outputs_start_together_than_may_and_the_rest_are_the_next_batch(
    batches: Batches, asked: list[Parameters], monkeypatch: pytest.MonkeyPatch
):
    asked += [asked[1].with_changes({"seed": 40}), asked[0].with_changes({"seed": 50})]
    alone = batches.alone(asked)
    monkeypatch.setattr(batches.engine.turns, "most_outputs", 4)
    made = results(batches.start(asked, [Recorder() for _ in asked]))
    assert max(map(difference, made, alone)) <= 1
    # Two, one and one; those of three and of two find no room and are too many for one batch.
    assert batches.encoded[:2] == [4, 4]
    assert sorted(batches.decoded) == [2, 3, 4]
