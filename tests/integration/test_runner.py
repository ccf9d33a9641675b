"""The runner over real Redis: lost claims, an edited timeout, input images, storing beside runs."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from PIL import Image

from configs.errors import DeviceLost, GenerationFailed
from routing.outputs import OutputStore
from routing.request import Priority, Request, Status
from tests.integration.routing_world import World, parameters
from tests.waiting import wait_until
from workers.engine.generation import Generation
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


class Painter(NoBatch):
    """An engine that is done at once."""

    def generate(self, _parameters: Any, progress: Any, _inputs: Any) -> Generation:
        progress.on_step(4, 4)
        picture = Image.new("RGB", (8, 8), "red")
        return Generation((picture,), (1,), "none", 4, 0.0, 0.0, 0.0)


class SlowStore(OutputStore):
    """A store that writes nothing before it may."""

    def __init__(self, url: str) -> None:
        super().__init__(url, tries=1)
        self.open = threading.Event()

    def write(self, name: str, data: bytes) -> None:
        assert self.open.wait(30)
        super().write(name, data)


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


@pytest.fixture
def painting(world: World) -> Iterator[tuple[Runner, SlowStore]]:
    """A runner whose store writes nothing before it is opened."""
    runner, store = _runner(world, Painter()), SlowStore(world.settings.outputs_url)
    runner.writer = OutputWriter(store, metadata=False)
    yield runner, store
    store.open.set()
    runner.finish()  # else its thread would keep this process


def test_a_claim_whose_answer_got_lost_is_handed_back(world: World) -> None:
    runner = _runner(world)
    request = world.submit()
    assert world.claim("replica0") is not None  # as far as the runner knows, this never happened
    runner.return_orphaned_claims()
    assert world.get(request.id).status is Status.RUNNING
    runner.return_orphaned_claims()
    record = world.get(request.id)
    assert (record.status, record.attempt, record.crashes) == (Status.QUEUED, 2, 0)


def test_a_replica_that_ends_leaves_no_claim_behind_that_would_count_as_a_crash(
    world: World,
) -> None:
    runner = _runner(world)
    request = world.submit()
    assert world.claim("replica0") is not None  # its answer got lost, just before the end
    runner.finish()
    record = world.get(request.id)
    assert (record.status, record.attempt, record.crashes) == (Status.QUEUED, 2, 0)


def test_what_an_attempt_stored_before_it_died_goes_when_a_later_one_has_ended(
    world: World, painting: tuple[Runner, SlowStore]
) -> None:
    runner, store = painting
    request = world.submit()
    assert world.claim("replica0") is not None
    for left in ("1-0.png", "1-1.png", ".1-2.png.part", "input-0.png"):
        world.outputs.write(f"{request.id}/{left}", b"left by the first attempt")
    runner.incarnation = world.start("replica0")
    world.sweep.run()
    store.open.set()
    assert runner.run_next() == request.id
    runner.finish()
    assert world.get(request.id).attempt == 2
    assert world.outputs.names(request.id) == [
        f"{request.id}/{name}" for name in ("2-0.png", "input-0.png")
    ]


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


def test_the_next_request_runs_while_the_last_is_stored_and_no_more_than_may_wait(
    world: World, painting: tuple[Runner, SlowStore]
) -> None:
    runner, store = painting
    first, second, third = (world.submit() for _ in range(3))
    assert runner.run_next() == first.id
    assert runner.has_room()
    # The store holds one that is done and no more, so the second keeps its slot once it is done.
    running = threading.Thread(target=runner.run_next)
    running.start()
    wait_until(lambda: len(runner.runs) == 2, 20, "the second to run")
    assert not runner.has_room()
    claimed = [world.get(each.id).status for each in (first, second, third)]
    assert claimed == [Status.RUNNING, Status.RUNNING, Status.QUEUED]
    world.records.cancel(second.id)
    store.open.set()
    running.join(20)
    assert runner.run_next() == third.id
    runner.finish()
    assert not runner.runs
    ended = [world.get(each.id) for each in (first, second, third)]
    assert [each.status for each in ended] == [
        Status.SUCCEEDED,
        Status.CANCELED,
        Status.SUCCEEDED,
    ]
    for each in (ended[0], ended[2]):
        assert each.outputs[0].bytes == len(store.read(each.outputs[0].name))
    with pytest.raises(FileNotFoundError):
        store.read(f"{second.id}/1-0.png")
    late = world.submit()
    assert runner.run_next() == late.id
    assert world.get(late.id).status is Status.SUCCEEDED


def test_who_loses_the_device_is_to_blame_and_what_is_being_stored_is_not(
    world: World, painting: tuple[Runner, SlowStore]
) -> None:
    class Lost(Painter):
        def generate(self, _parameters: Any, _progress: Any, _inputs: Any) -> Generation:
            raise DeviceLost("the device no longer answers")

    runner, store = painting
    stored, lost = world.submit(), world.submit()
    assert runner.run_next() == stored.id
    runner.engine = Lost()  # type: ignore[assignment]
    assert runner.run_next() == lost.id
    record = world.get(lost.id)
    assert (record.status, record.crashes) == (Status.QUEUED, 1)
    store.open.set()
    runner.finish()
    record = world.get(stored.id)
    assert (record.status, record.crashes) == (Status.SUCCEEDED, 0)


def test_what_cannot_be_stored_fails_and_what_a_dead_replica_had_not_stored_runs_again(
    world: World, painting: tuple[Runner, SlowStore]
) -> None:
    world.start("replica1")
    runner, store = painting

    def submit() -> Request:
        while (request := world.submit()).replica != "replica0":
            pass
        return request

    lost = submit()
    assert runner.run_next() == lost.id
    moved = world.claims.move_crashed(world.get(lost.id))  # as the sweep does it
    assert moved is not None
    assert (moved.replica, moved.attempt) == ("replica1", 2)
    store.open.set()
    wait_until(lambda: not runner.runs, 20, "the lost attempt to end")
    assert world.get(lost.id).status is Status.QUEUED
    with pytest.raises(FileNotFoundError):
        store.read(f"{lost.id}/1-0.png")

    runner.writer = OutputWriter(OutputStore("file:///proc/nowhere", tries=1), metadata=False)
    failed = submit()
    assert runner.run_next() == failed.id
    runner.finish()
    error = world.get(failed.id).error
    assert error is not None
    assert error.code == "output_write_failed"
