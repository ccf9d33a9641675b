"""Runs that are watched, stopped and steered between two steps."""

import contextlib
import threading
from typing import Any

import pytest

from tests.engine.conftest import MakeParameters, count_decodes
from tests.engine.living_tensors import growth
from tests.engine.recorder import Recorder
from workers.engine.abilities import inspect_abilities
from workers.engine.engine import Engine
from workers.engine.progress import Interrupted

MAX_NUM_SEQS = (1, 8)
STEPS = 6
WHOLE_WAY = [(0, STEPS), *((step, STEPS) for step in range(STEPS + 1))]


@pytest.mark.parametrize("kind", ["engine", "busy_engine"])
def test_every_step_is_told_in_order(
    kind: str, request: pytest.FixtureRequest, parameters: MakeParameters
):
    engine: Engine = request.getfixturevalue(kind)
    recorder = Recorder()
    engine.generate(parameters(), recorder)
    assert recorder.calls == WHOLE_WAY


def test_second_order_schedulers_tell_the_calls_they_really_make(
    engine: Engine, parameters: MakeParameters
):
    recorder = Recorder()
    made = engine.generate(parameters(scheduler="HeunDiscreteScheduler"), recorder)
    real = 2 * STEPS - 1
    assert made.steps == real
    assert recorder.calls == [(0, STEPS), *((step, real) for step in range(real + 1))]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(0, id="before the text is encoded"),
        pytest.param(1, id="before the first step"),
        pytest.param(4, id="half way"),
        pytest.param(len(WHOLE_WAY) - 1, id="before decoding"),
    ],
)
@pytest.mark.parametrize("max_num_seqs", MAX_NUM_SEQS)
def test_an_interrupted_run_ends_there_and_decodes_nothing(
    pipe: Any, parameters: MakeParameters, call: int, max_num_seqs: int
):
    own_engine = Engine(pipe, inspect_abilities(pipe, {}), max_num_seqs=max_num_seqs)
    decodes = count_decodes(pipe)
    forwards: list[None] = []
    pipe.unet.register_forward_hook(lambda *_: forwards.append(None))
    recorder = Recorder(stop_at=call)
    with pytest.raises(Interrupted) as caught:
        own_engine.generate(parameters(), recorder)
    assert caught.value.reason == "canceled"
    assert recorder.calls == WHOLE_WAY[: call + 1]
    assert len(forwards) == WHOLE_WAY[call][0]
    assert decodes == []
    own_engine.generate(parameters(), Recorder())
    assert len(decodes) == 1


def test_a_run_that_waits_for_its_turn_can_be_interrupted(
    busy_engine: Engine, parameters: MakeParameters
):
    engine = busy_engine
    holds_turn, may_go_on = threading.Event(), threading.Event()

    class Holder(Recorder):
        def on_step(self, step: int, steps: int):
            super().on_step(step, steps)
            holds_turn.set()
            assert may_go_on.wait(timeout=30)

    holder = threading.Thread(target=engine.generate, args=(parameters(), Holder()))
    holder.start()
    assert holds_turn.wait(timeout=30)
    try:
        waiting = Recorder(stop_at=0)
        with pytest.raises(Interrupted):
            engine.generate(parameters(), waiting)
        assert waiting.calls == [(0, STEPS)]
    finally:
        may_go_on.set()
        holder.join(timeout=30)


def test_guidance_changed_before_the_first_step_is_the_guidance_asked_for(
    engine: Engine, parameters: MakeParameters
):
    changed = engine.generate(parameters(guidance_scale=3.0), Recorder(guidance=6.0))
    asked = engine.generate(parameters(guidance_scale=6.0), Recorder())
    unchanged = engine.generate(parameters(guidance_scale=3.0), Recorder())
    assert changed.images[0].tobytes() == asked.images[0].tobytes()
    assert changed.images[0].tobytes() != unchanged.images[0].tobytes()
    assert changed.warnings == ()


@pytest.mark.parametrize(("asked", "wanted"), [(3.0, 1.0), (1.0, 3.0)])
def test_guidance_is_neither_switched_on_nor_off_while_running(
    engine: Engine, parameters: MakeParameters, asked: float, wanted: float
):
    steered = engine.generate(parameters(guidance_scale=asked), Recorder(guidance=wanted))
    plain = engine.generate(parameters(guidance_scale=asked), Recorder())
    assert steered.images[0].tobytes() == plain.images[0].tobytes()
    assert steered.warnings == (f"guidance_scale could not be changed to {wanted:g} while running",)


def test_one_run_s_guidance_is_not_the_next_one_s(engine: Engine, parameters: MakeParameters):
    before = engine.generate(parameters(), Recorder())
    engine.generate(parameters(), Recorder(guidance=7.0))
    after = engine.generate(parameters(), Recorder())
    assert before.images[0].tobytes() == after.images[0].tobytes()


@pytest.mark.parametrize("kind", ["engine", "busy_engine"])
@pytest.mark.parametrize("stop_at", [None, 0, 1, 3])
@pytest.mark.parametrize("scheduler", ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_a_run_leaves_no_tensor_behind_that_only_the_garbage_collector_finds(
    kind: str,
    request: pytest.FixtureRequest,
    parameters: MakeParameters,
    scheduler: str,
    stop_at: int | None,
):
    """It would keep latents and embeddings of the device until it happens to run."""
    engine: Engine = request.getfixturevalue(kind)

    def run() -> None:
        with contextlib.suppress(Interrupted):
            engine.generate(parameters(scheduler=scheduler), Recorder(stop_at=stop_at))

    run()
    assert growth(run) == 0


def test_a_run_that_waits_for_its_turn_to_decode_can_be_interrupted(
    pipe: Any, parameters: MakeParameters
):
    own_engine = Engine(pipe, inspect_abilities(pipe, {}), max_num_seqs=8)
    decodes = count_decodes(pipe)
    is_there, may_go_on = threading.Event(), threading.Event()

    class Holder(Recorder):
        def on_step(self, step: int, steps: int):
            super().on_step(step, steps)
            is_there.set()
            assert may_go_on.wait(timeout=30)

    class Waiter(Recorder):
        def on_step(self, step: int, steps: int):
            if step == 1:
                holder.start()
            # It has the turn from now on, and keeps it.
            assert step == 0 or is_there.wait(timeout=30)
            super().on_step(step, steps)
            if len(self.calls) > len(WHOLE_WAY) + 1:
                raise Interrupted("canceled")

    holder = threading.Thread(target=own_engine.generate, args=(parameters(), Holder()))
    waiter = Waiter()
    try:
        with pytest.raises(Interrupted):
            own_engine.generate(parameters(), waiter)
        assert waiter.calls == [*WHOLE_WAY, (STEPS, STEPS), (STEPS, STEPS)]
        assert decodes == []
    finally:
        may_go_on.set()
        holder.join(timeout=30)
    assert len(decodes) == 1
    assert own_engine.requests_waiting == 0
