"""Requests that wait together start as one pipeline call: which do, and which do not."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.parameters import TEXT_TO_IMAGE, Parameters
from scripts.lab.families import save_family
from scripts.lab.family_trial import small_request
from tests.engine.batch_requests import PROMPTS, one_output_each
from tests.engine.batches import TIMEOUT_S, Batches, difference
from tests.engine.conftest import MakeParameters, patient, plan
from tests.engine.recorder import Recorder
from tests.engine.toy_denoiser import Gate
from tests.waiting import wait_until
from workers.engine.loader import load_pipeline
from workers.engine.progress import Interrupted


@pytest.fixture
def asked(parameters: MakeParameters) -> list[Parameters]:
    return one_output_each(parameters)


def test_those_that_wait_together_are_encoded_denoised_and_decoded_together(
    batches: Batches, asked: list[Parameters]
):
    asked[1] = asked[1].with_changes({"output_format": "webp", "output_compression": 3})
    alone = batches.alone(asked)
    watchers = [Recorder() for _ in asked]
    made = [each.result(TIMEOUT_S) for each in batches.start(asked, watchers)]
    assert max(map(difference, made, alone)) <= 1
    assert batches.encoded == [4, 4]  # with and without the prompt
    assert batches.decoded == [4]
    for generation, each, watcher in zip(made, asked, watchers, strict=True):
        assert generation.seeds == (each.seed,)
        assert generation.batch_mean == 4
        assert list(dict.fromkeys(watcher.calls)) == [(step, 6) for step in range(7)]


def test_prompts_of_different_lengths_start_together_where_their_model_pads_them(tmp_path: Path):
    """Qwen-Image pads the prompts of a list, and calls its denoiser for each guidance apart."""
    batches = Batches(load_pipeline(plan(save_family("qwen_image", tmp_path))), width=48, height=32)
    asked = [
        small_request(batches.engine.abilities, TEXT_TO_IMAGE, prompt=prompt, seed=seed)
        for seed, prompt in enumerate(PROMPTS)
    ]
    asked = [
        each.with_changes({"negative_prompt": negative, "true_cfg_scale": 3.0})
        for each, negative in zip(
            asked, ("blue", "", "a square", "a long list of words"), strict=True
        )
    ]
    alone = batches.alone(asked)
    watchers = [Recorder() for _ in asked]
    made = [each.result(TIMEOUT_S) for each in batches.start(asked, watchers)]
    batches.pool.shutdown()
    assert max(map(difference, made, alone)) <= 1
    assert (batches.encoded, batches.decoded) == ([4, 4], [4])
    assert [each.batch_mean for each in made] == [4] * 4
    for watcher in watchers:
        assert list(dict.fromkeys(watcher.calls)) == [(step, 3) for step in range(4)]


def test_a_longer_prompt_that_comes_later_meets_a_batch_of_shorter_ones(tmp_path: Path):
    batches = Batches(load_pipeline(plan(save_family("qwen_image", tmp_path))), width=48, height=32)
    # The later one steps while the others are held.
    batches.engine.rendezvous.queue.max_wait_s = 0.0
    asked = [
        small_request(
            batches.engine.abilities,
            TEXT_TO_IMAGE,
            prompt=prompt,
            seed=seed,
            num_inference_steps=6 if seed < 2 else 7,
        )
        for seed, prompt in enumerate(("a star", "x", "a red circle on a blue background"))
    ]
    alone = batches.alone(asked)
    gate = Gate()

    class Holder(Recorder):
        """Holds its batch after the first step, until the later one has made one."""

        def on_step(self, step: int, steps: int) -> None:
            super().on_step(step, steps)
            if step == 1:
                gate()

    class Late(Recorder):
        def on_step(self, step: int, steps: int) -> None:
            super().on_step(step, steps)
            assert gate.reached.wait(TIMEOUT_S)  # the others have made their first step
            if step == 1:
                patient(batches.engine.rendezvous)
                gate.open()

    started = batches.start(asked, [Holder(), Recorder(), Late()])
    made = [each.result(TIMEOUT_S) for each in started]
    batches.pool.shutdown()
    assert max(map(difference, made, alone)) <= 1
    # Four steps are shared by three, after one in which that is checked; the later one makes its
    # first and its last by itself.
    assert [each.batch_mean for each in made] == [(2 + 2 + 4 * 3) / 6] * 2 + [(3 + 4 * 3) / 7]


@pytest.mark.parametrize(
    "change",
    [
        {"num_inference_steps": 7},
        {"guidance_scale": 4.0},
        {"scheduler": "EulerAncestralDiscreteScheduler"},
        {"negative_prompt": "blue"},
        {"guidance_rescale": 0.7},
        {"clip_skip": 1},
        {"prompt_weighting": True, "prompt": "a (blue:1.5) square"},
        {"width": 48},
        {"deterministic": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_those_that_ask_for_something_else_start_by_themselves(
    batches: Batches, asked: list[Parameters], change: dict[str, Any]
):
    asked = [asked[0], asked[1].with_changes(change)]
    alone = batches.alone(asked)
    made = [each.result(TIMEOUT_S) for each in batches.start(asked, [Recorder(), Recorder()])]
    assert max(map(difference, made, alone)) <= 1
    # The empty prompt too, where words are weighed.
    assert len(batches.encoded) == (6 if "prompt_weighting" in change else 4)


def test_negative_prompts_of_their_own_do_not_part_them(batches: Batches, asked: list[Parameters]):
    asked = [
        each.with_changes({"negative_prompt": negative})
        for each, negative in zip(asked[:2], ("blue", "a circle"), strict=True)
    ]
    alone = batches.alone(asked)
    made = [each.result(TIMEOUT_S) for each in batches.start(asked, [Recorder(), Recorder()])]
    assert max(map(difference, made, alone)) <= 1
    assert batches.encoded == [2, 2]


def test_requests_that_come_at_once_start_together_though_the_turn_is_free(
    batches: Batches, asked: list[Parameters], monkeypatch: pytest.MonkeyPatch
):
    batches.alone(asked)
    gates = [Gate() for _ in asked]
    engine = batches.engine
    monkeypatch.setattr(engine.turns, "patience_s", TIMEOUT_S)

    def come(index: int):
        with engine.request_coming():
            gates[index]()
            return engine.generate(asked[index], Recorder())

    coming = [batches.pool.submit(come, index) for index in range(4)]
    for gate in gates:
        assert gate.reached.wait(TIMEOUT_S)
    for gate in gates:
        gate.open()
    for each in coming:
        assert each.result(TIMEOUT_S).batch_mean == 4
    assert batches.encoded == [4, 4]


def test_a_lone_request_waits_for_nobody_and_for_those_that_do_not_come_a_moment(
    batches: Batches, asked: list[Parameters]
):
    gate = Gate()

    def come_in_vain():
        with batches.engine.request_coming():
            gate()

    with batches.engine.request_coming():
        batches.engine.generate(asked[0], Recorder())
    vain = batches.pool.submit(come_in_vain)
    assert gate.reached.wait(TIMEOUT_S)
    batches.engine.generate(asked[0], Recorder())
    gate.open()
    vain.result(TIMEOUT_S)
    assert batches.encoded == [1, 1, 1, 1]


def test_a_model_that_is_wrong_in_batch_is_found_out_at_warm_up(
    pipe: Any, asked: list[Parameters], caplog: pytest.LogCaptureFixture
):
    encode = pipe.text_encoder.forward

    def mixing(input_ids: torch.Tensor, *args: Any, **options: Any):
        output = encode(input_ids, *args, **options)
        output.last_hidden_state = output.last_hidden_state + output[0].mean(0, keepdim=True)
        return output

    pipe.text_encoder.forward = mixing
    batches = Batches(pipe)
    assert "requests do not start together, for that changes pixels" in caplog.text
    alone = batches.alone(asked)
    made = [each.result(TIMEOUT_S) for each in batches.start(asked, [Recorder()] * 4)]
    assert max(map(difference, made, alone)) <= 1
    assert batches.encoded == [1] * 8
    batches.pool.shutdown()


def test_a_model_that_gives_all_the_negative_prompt_of_the_first_is_found_out(
    pipe: Any, asked: list[Parameters], caplog: pytest.LogCaptureFixture
):
    class OfTheFirst(type(pipe)):  # type: ignore[misc]
        def encode_prompt(
            self, prompt: Any, device: Any, number: int, guided: bool, negative: Any, **options: Any
        ) -> Any:
            if isinstance(negative, list):
                negative = negative[:1] * len(negative)
            return super().encode_prompt(prompt, device, number, guided, negative, **options)

    pipe.__class__ = OfTheFirst
    batches = Batches(pipe)
    assert "requests do not start together, for that changes pixels" in caplog.text
    asked = [each.with_changes({"negative_prompt": each.prompt[2:]}) for each in asked[::-1]]
    alone = batches.alone(asked)
    made = [each.result(TIMEOUT_S) for each in batches.start(asked, [Recorder()] * 4)]
    assert max(map(difference, made, alone)) <= 1
    batches.pool.shutdown()


def test_whoever_is_canceled_while_it_waits_is_not_taken_along(
    batches: Batches, asked: list[Parameters]
):
    alone = batches.alone(asked)
    released = threading.Event()

    class Impatient(Recorder):
        def on_step(self, step: int, steps: int) -> None:
            released.set()
            raise Interrupted("canceled")

    gate = Gate()

    class Holder(Recorder):
        def on_step(self, step: int, steps: int) -> None:
            super().on_step(step, steps)
            gate()

    holder = batches.pool.submit(batches.engine.generate, asked[0], Holder())
    assert gate.reached.wait(TIMEOUT_S)
    canceled = batches.pool.submit(batches.engine.generate, asked[1], Impatient())
    others = [batches.pool.submit(batches.engine.generate, each, Recorder()) for each in asked[2:]]
    assert released.wait(TIMEOUT_S)
    with pytest.raises(Interrupted):
        canceled.result(TIMEOUT_S)
    wait_until(lambda: batches.engine.requests_waiting == 2, TIMEOUT_S, "the others")
    gate.open()
    made = [holder.result(TIMEOUT_S), *(each.result(TIMEOUT_S) for each in others)]
    assert max(map(difference, made, [alone[0], *alone[2:]])) <= 1
