"""Requests of one batch stay requests of their own: each is canceled, guided and fails alone."""

import contextlib
import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.errors import GenerationFailed, NonFiniteOutput
from configs.parameters import TEXT_TO_IMAGE, Parameters
from scripts.lab.families import save_family
from scripts.lab.family_trial import small_request
from tests.engine.batch_requests import PROMPTS, one_output_each
from tests.engine.batches import TIMEOUT_S, Batches, Canceler, Last, difference
from tests.engine.conftest import MakeParameters, plan
from tests.engine.living_tensors import growth
from tests.engine.recorder import Recorder, Steerer
from tests.engine.toy_denoiser import Gate
from tests.waiting import wait_until
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted


@pytest.fixture
def asked(parameters: MakeParameters) -> list[Parameters]:
    return one_output_each(parameters)


@pytest.mark.parametrize("who", [0, 2], ids=["the first", "another"])
@pytest.mark.parametrize("step", [1, 3, 6], ids=["early", "half way", "at the end"])
def test_one_that_is_canceled_leaves_at_the_next_step_and_is_not_decoded(
    batches: Batches,
    asked: list[Parameters],
    who: int,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
):
    alone = batches.alone(asked)
    rows = batches.count_rows(monkeypatch)
    gate = Gate()

    # Held until the canceled one is seen to be over.
    watchers: list[Any] = [Recorder(), Recorder(), Recorder(), Last(gate)]
    watchers[who] = Canceler(step)
    made = batches.start(asked, watchers)
    with pytest.raises(Interrupted):
        made[who].result(TIMEOUT_S)
    assert not any(each.done() for index, each in enumerate(made) if index != who)
    gate.open()
    for index in {0, 1, 2, 3} - {who}:
        assert difference(made[index].result(TIMEOUT_S), alone[index]) <= 1
    assert batches.decoded == [3]
    assert sum(rows) == 2 * (6 * 3 + step)


def test_when_all_are_canceled_nothing_goes_on(batches: Batches, asked: list[Parameters]):
    batches.alone(asked)
    made = batches.start(asked, [Canceler(1 + index) for index in range(4)])
    for each in made:
        with pytest.raises(Interrupted):
            each.result(TIMEOUT_S)
    assert batches.decoded == []
    assert batches.engine.generate(asked[0], Recorder()).steps == 6


@pytest.mark.parametrize("stops", [(1, 1, 1, 1), (9, 2, 9, 9), (6, 6, 6, 6)])
def test_a_batch_leaves_no_tensor_behind_that_only_the_garbage_collector_finds(
    batches: Batches, asked: list[Parameters], stops: Sequence[int]
):
    def generate(index: int) -> None:
        with batches.engine.request_coming(), contextlib.suppress(Interrupted):
            batches.engine.generate(asked[index], Canceler(stops[index]))

    def run() -> None:
        for each in [batches.pool.submit(generate, index) for index in range(4)]:
            each.result(TIMEOUT_S)
        # A request may have its answer before its batch's thread is at its end.
        wait_until(_no_batch, TIMEOUT_S, "the batch")

    for _ in range(16):  # after which previews have learnt enough
        batches.engine.generate(asked[0].with_changes({"num_inference_steps": 1}), Recorder())
    run()
    assert growth(run) == 0


def _no_batch() -> bool:
    return not any(each.name == "batch" for each in threading.enumerate())


def test_one_changes_its_guidance_among_the_others(batches: Batches, asked: list[Parameters]):
    alone = batches.alone(asked)
    steered = batches.engine.generate(asked[1], Steerer(3, guidance_scale=8.0))
    assert difference(steered, alone[1]) > 8
    batches.encoded.clear()
    watchers = [Recorder(), Steerer(3, guidance_scale=8.0), Recorder(), Recorder()]
    made = [each.result(TIMEOUT_S) for each in batches.start(asked, watchers)]
    alone[1] = steered
    assert max(map(difference, made, alone)) <= 1
    assert batches.encoded == [4, 4]
    assert [each.batch_mean for each in made] == [4] * 4
    assert [each.warnings for each in made] == [()] * 4


def test_an_embedded_guidance_is_each_one_s_own(tmp_path: Path):
    batches = Batches(load_pipeline(plan(save_family("flux", tmp_path))), width=48, height=32)
    asked = [
        small_request(batches.engine.abilities, TEXT_TO_IMAGE, prompt=prompt, seed=seed)
        for seed, prompt in enumerate(PROMPTS)
    ]
    alone = batches.alone(asked)
    watchers = [Recorder(), Steerer(0, guidance_scale=90.0), Steerer(1, guidance_scale=0.0)]
    for index in (1, 2):
        steered = batches.engine.generate(asked[index], copy.deepcopy(watchers[index]))
        assert difference(steered, alone[index]) > 2
        alone[index] = steered
    batches.encoded.clear()
    made = [each.result(TIMEOUT_S) for each in batches.start(asked, [*watchers, Recorder()])]
    batches.pool.shutdown()
    assert max(map(difference, made, alone)) <= 1
    assert [each.batch_mean for each in made] == [4] * 4
    assert [each.warnings for each in made] == [()] * 4


@pytest.mark.parametrize("at", [0, 1], ids=["before the first step", "later"])
def test_one_whose_guidance_changes_begins_anew_where_samples_are_guided_one_by_one(
    tmp_path: Path, at: int
):
    batches = Batches(load_pipeline(plan(save_family("z_image", tmp_path))), width=48, height=32)
    asked = [
        small_request(batches.engine.abilities, TEXT_TO_IMAGE, prompt=prompt, seed=seed)
        for seed, prompt in enumerate(PROMPTS)
    ]
    alone = batches.alone(asked)
    steered = batches.engine.generate(asked[1], Steerer(at, guidance_scale=9.0))
    assert difference(steered, alone[1]) > 8
    batches.decoded.clear()
    steerer = Steerer(at, guidance_scale=9.0)
    started = batches.start(asked, [Recorder(), steerer, Recorder(), Recorder()])
    made = [each.result(TIMEOUT_S) for each in started]
    batches.pool.shutdown()
    alone[1] = steered
    assert max(map(difference, made, alone)) <= 1
    assert steerer.calls == sorted(steerer.calls)
    assert made[1].steps == 3
    assert sorted(batches.decoded) == [1, 3]
    assert [each.warnings for each in made] == [()] * 4


def test_guidance_that_cannot_be_changed_is_said_and_parts_nobody(
    batches: Batches, asked: list[Parameters]
):
    watchers = [Recorder(), Recorder(guidance=1.0)]
    made = [each.result(TIMEOUT_S) for each in batches.start(asked[:2], watchers)]
    assert made[0].warnings == ()
    assert made[1].warnings == ("guidance_scale could not be changed to 1 while running",)
    assert batches.encoded[-2:] == [2, 2]


def test_only_the_one_that_gives_nan_fails(
    batches: Batches, asked: list[Parameters], monkeypatch: pytest.MonkeyPatch
):
    alone = batches.alone(asked)
    batches.spoil(monkeypatch, row=2, of=4)
    made = batches.start(asked, [Recorder() for _ in asked])
    with pytest.raises(NonFiniteOutput):
        made[2].result(TIMEOUT_S)
    for index in (0, 1, 3):
        assert difference(made[index].result(TIMEOUT_S), alone[index]) <= 1
    assert batches.decoded == [3]


def test_where_a_batch_fails_each_runs_by_itself_and_only_the_culprit_fails(
    batches: Batches,
    asked: list[Parameters],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    alone = batches.alone(asked)
    encode_prompt = batches.pipe.encode_prompt

    def choosy(prompt: Any, *args: Any, **options: Any):
        if "x" in (prompt if isinstance(prompt, list) else [prompt]):
            raise ValueError("no such word")
        return encode_prompt(prompt, *args, **options)

    monkeypatch.setitem(vars(batches.pipe), "encode_prompt", choosy)  # copies have it too
    made = batches.start(asked, [Recorder() for _ in asked])
    with pytest.raises(GenerationFailed, match="no such word"):
        made[3].result(TIMEOUT_S)
    for index in range(3):
        assert difference(made[index].result(TIMEOUT_S), alone[index]) <= 1
    assert "4 requests that started together failed, each runs by itself" in caplog.text


def test_where_there_is_no_thread_for_a_batch_each_runs_by_itself(
    batches: Batches, asked: list[Parameters], monkeypatch: pytest.MonkeyPatch
):
    alone = batches.alone(asked)
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "batch":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    made = [each.result(TIMEOUT_S) for each in batches.start(asked, [Recorder() for _ in asked])]
    assert max(difference(one, other) for one, other in zip(made, alone, strict=True)) <= 1
    assert batches.engine.requests_waiting == 0
