"""The runner over real Redis: lost claims, a timeout that came by an edit, input images."""

from __future__ import annotations

import io
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from PIL import Image

from configs.errors import GenerationFailed
from routing.request import Priority, Status
from tests.integration.routing_world import World, parameters
from tests.waiting import wait_until
from workers.outputs import OutputWriter
from workers.progress import Reporter, RunningRequest
from workers.runner import Runner


class NoBatch:
    """An engine that makes nothing of knowing who comes."""

    def request_coming(self) -> AbstractContextManager[None]:
        return nullcontext()


class EndlessEngine(NoBatch):
    """An engine whose step never changes anything, until its progress ends it."""

    def __init__(self) -> None:
        self.began = threading.Event()

    def generate(self, _parameters: Any, progress: Any, _inputs: Any) -> Any:
        while True:
            progress.on_step(1, 4)
            self.began.set()


class PickyEngine(NoBatch):
    """An engine that says which image it got, and makes nothing."""

    def generate(self, _parameters: Any, _progress: Any, inputs: Any) -> Any:
        image = inputs.images[0]
        raise GenerationFailed(f"got {image.mode} {image.size}")


NO_ENGINE = NoBatch()


def _runner(world: World, engine: Any = NO_ENGINE) -> Runner:
    runs: dict[str, RunningRequest] = {}
    return Runner(
        name="replica0",
        incarnation=world.start("replica0"),
        engine=engine,
        claims=world.claims,
        writer=OutputWriter(world.outputs, metadata=True),
        broker=world.broker,
        reporter=Reporter(world.claims, world.records.get, runs),
        runs=runs,
        on_device_lost=lambda _why: None,
    )


def test_a_claim_whose_answer_got_lost_is_handed_back(world: World) -> None:
    runner = _runner(world)
    request = world.submit()
    assert world.claim("replica0") is not None  # as far as the runner knows, this never happened
    runner.return_orphaned_claims()
    assert world.get(request.id).status is Status.RUNNING
    runner.return_orphaned_claims()
    record = world.get(request.id)
    assert (record.status, record.attempt, record.crashes) == (Status.QUEUED, 2, 0)


def test_a_timeout_that_an_edit_brought_ends_the_run_with_its_reason(world: World) -> None:
    engine = EndlessEngine()
    runner = _runner(world, engine)
    request = world.submit()
    reporter = runner.reporter
    reporter.start()
    thread = threading.Thread(target=runner.run_next)
    thread.start()
    try:
        assert engine.began.wait(10)
        running = world.get(request.id)
        world.records.edit(running, running.parameters, Priority.NORMAL, timeout=0.01)
        reporter.wake()
        wait_until(lambda: world.get(request.id).is_terminal, 20, "the run to end")
    finally:
        world.records.cancel(request.id)
        reporter.wake()
        thread.join(20)
        reporter.stop()
    record = world.get(request.id)
    assert record.error is not None
    assert (record.status, record.error.code) == (Status.FAILED, "timeout")
    assert "0.01 s" in record.error.message


def test_a_request_whose_input_image_is_gone_fails_and_says_so(world: World) -> None:
    asked = parameters(task="image-to-image", image=("req_x/input-0.png",))
    runner = _runner(world)
    request = world.submit(parameters=asked)
    assert runner.run_next() == request.id
    error = world.get(request.id).error
    assert error is not None
    assert error.code == "input_unavailable"
    assert "req_x/input-0.png" in error.message


def test_input_images_are_decoded_before_the_engine_gets_them(world: World) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    world.outputs.write("req_x/input-0.png", file.getvalue())
    runner = _runner(world, PickyEngine())
    request = world.submit(parameters=parameters(image=("req_x/input-0.png",)))
    runner.run_next()
    error = world.get(request.id).error
    assert error is not None
    assert error.message == "got RGB (8, 8)"
