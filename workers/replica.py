"""The replica: the life of this process from loading to its end, and the parts it is made of."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from configs.devices import Machine
from configs.errors import GenerationError
from configs.settings import Settings
from configs.stage_config import ReplicaPlan
from routing.broker import Broker
from routing.claims import Claims
from routing.connection import connect
from routing.outputs import OutputStore
from routing.records import Records
from routing.replica import DrainCommand, Heartbeat, LoadedModel, Registry, ReplicaState
from workers.exit import Demise
from workers.heartbeat import HeartbeatThread, Reactions, ReplicaMark
from workers.progress import Reporter, Run, Stop

_logger = logging.getLogger(__name__)


if TYPE_CHECKING:  # it brings torch, which must not come before the device chunk is set
    from workers.runner import Runner


class Draining:
    """Drains one replica.

    Attributes:
        runner: What runs here, once the pipeline is loaded.
    """

    def __init__(self, name: str, mark: ReplicaMark, drain_s: float) -> None:
        """Give what runs ``drain_s`` seconds where the process is to end and nobody said more."""
        self.runner: Runner | None = None
        self._name = name
        self._mark = mark
        self._usual_s = drain_s
        self._last_s = drain_s
        self._wish: DrainCommand | None = None
        self._hand_back_at = 0.0

    def heed(self, wish: DrainCommand | None) -> None:
        """Do what an operator wants: hand back what runs in time, and end if that is the wish."""
        if wish is None or self.runner is None or self._mark.stopping:
            self._wish = None
            return
        if wish != self._wish:
            self._wish = wish
            self._hand_back_at = time.monotonic() + wish.seconds
            _logger.info("%s drains; what runs may take %g s more", self._name, wish.seconds)
        if wish.ends:
            _logger.warning("%s ends as it was told, to be started again", self._name)
            self._mark.stopping, self._last_s = True, wish.seconds
            os.kill(os.getpid(), signal.SIGTERM)
        elif time.monotonic() >= self._hand_back_at:
            self.runner.hand_back_all()

    def begin_last(self) -> None:
        """Take nothing more, and hand back what still runs when its time is over.

        Called in a signal handler: it only sets a flag and starts a timer.
        """
        # A second signal is somebody in more of a hurry than the operator was.
        drain_s, self._last_s = self._last_s, self._usual_s
        if self.runner is not None:
            self.runner.closed.set()
            timer = threading.Timer(drain_s, self.runner.stop_all, args=(Stop.HAND_BACK,))
            timer.daemon = True
            timer.start()


if TYPE_CHECKING:
    from workers.runner import Runner


_WAKES_AT_ONCE = 100  # the heartbeat has other things to do; the next one goes on


_current: ReplicaProcess | None = None


def current() -> ReplicaProcess:
    """Return the replica this process is.

    Raises:
        RuntimeError: It is none: it was not started as a worker with ``-Q replica<number>``.
    """
    if _current is None:
        raise RuntimeError(
            "this process is no replica; start it by: celery -A workers worker -Q replica0"
        )
    return _current


def become(replica: ReplicaProcess) -> ReplicaProcess:
    """Make this process a replica, for as long as it lives."""
    global _current  # noqa: PLW0603 - one process is one replica, and Celery's hooks take no argument
    _current = replica
    return replica


class ReplicaProcess:
    """One replica of one stage, in this process.

    Attributes:
        exit_code: That of the process, once it has nothing more to do.
    """

    def __init__(self, plan: ReplicaPlan, settings: Settings, machine: Machine) -> None:
        """Connect to nothing yet."""
        self.plan = plan
        self.exit_code: int | None = None
        self._settings = settings
        self._own = ReplicaMark(plan, machine)
        redis = connect(settings.redis_url)
        self._registry = Registry(settings, redis)
        self._claims = Claims(settings, redis)
        self._broker = Broker(settings)
        self._runner: Runner | None = None
        self._demise = Demise(plan.name, self._own)
        self._draining = Draining(plan.name, self._own, settings.drain_s)
        self._heartbeat = HeartbeatThread(
            self._registry,
            self._mark,
            settings.heartbeat_s,
            Reactions(
                stuck=lambda: self._demise.is_stuck(settings.stuck_after_s),
                has_room=self._has_room,
                wake=self._wake_self,
                return_strays=self._return_strays,
                heed=self._draining.heed,
                superseded=self._demise.superseded,
            ),
        )
        self._reporter = Reporter(self._claims, Records(settings, redis).get, self._runs)

    @property
    def node(self) -> str:
        """Its Celery node name."""
        return self._own.node

    def load(self) -> None:
        """Load and warm up the pipeline, with the heartbeat saying so.

        Raises:
            GenerationError: It could not be loaded or warmed up; the registry keeps the reason.
        """
        self._heartbeat.start()
        # Here, since torch must not be imported before the device chunk is set.
        from workers.engine.engine import Engine
        from workers.outputs import OutputWriter
        from workers.runner import Runner

        try:
            engine = Engine.load(self.plan)
            engine.warm_up()
        except GenerationError as error:
            self._own.fail(str(error))
            self._heartbeat.stop()
            raise
        self._registry.publish_model(
            LoadedModel(self.plan.stage.model_name, self.plan.stage.stage_id, engine.abilities)
        )
        outputs = OutputStore(self._settings.outputs_url)
        runner = Runner(
            name=self.plan.name,
            incarnation=self._own.incarnation,
            engine=engine,
            claims=self._claims,
            writer=OutputWriter(outputs, self._settings.output_metadata),
            broker=self._broker,
            on_progress=self._reporter.wake,
            on_device_lost=lambda why: self._demise.lose_device(why, runner, self._heartbeat),
            preview_every_s=self._settings.preview_every_s,
        )
        self._runner = self._demise.runner = self._draining.runner = runner
        self._reporter.start()
        engine.watch_devices(runner.on_device_lost)

    def open(self) -> None:
        """Join the rotation: the queue is being read from now on."""
        self._own.state = ReplicaState.READY
        self._heartbeat.heartbeat_now()
        _logger.info(
            "%s is ready: %s on %s", self.plan.name, self.plan.stage.model_name, self.plan.devices
        )

    def run_next(self) -> str | None:
        """Run the first request of the line; its id, or None where nothing waited."""
        return self._runner.run_next() if self._runner else None

    def cancel(self, request_id: str, attempt: int) -> bool:
        """Stop a run at its next step; False where it does not run here."""
        run = self._run_of(request_id, attempt)
        if run is not None:
            run.stop(Stop.CANCELED)
        return run is not None

    def refresh(self, request_id: str, attempt: int) -> bool:
        """Have a run's record read again; False where it does not run here."""
        if self._run_of(request_id, attempt) is None:
            return False
        self._reporter.wake()
        return True

    def heartbeat_now(self) -> None:
        """Write a heartbeat without waiting for the next turn."""
        self._heartbeat.heartbeat_now()

    def stop(self) -> None:
        """Begin to end: leave the rotation now, hand what runs back after its time to drain.

        Called in a signal handler: it only sets flags and starts a timer.
        """
        self._own.leave()
        self._heartbeat.heartbeat_now()
        self._draining.begin_last()

    def close(self, exit_code: int) -> None:
        """End: the runs are over, the registry is told; a failed one has told its reason before."""
        if self._own.state is ReplicaState.FAILED:
            return
        if self._runner is not None:
            self._reporter.stop()
            self._runner.engine.close()
        self._own.state = ReplicaState.GONE
        self._heartbeat.stop()
        self.exit_code = exit_code

    def _run_of(self, request_id: str, attempt: int) -> Run | None:
        run = self._runner.runs.get(request_id) if self._runner else None
        return run if run is not None and run.request.attempt == attempt else None

    def _runs(self) -> Collection[Run]:
        return self._runner.runs.values() if self._runner else ()

    def _mark(self) -> Heartbeat:
        if self._runner is None:
            return self._own.taken(None, None)
        return self._own.taken(self._runner.step_s, self._runner.engine.device_memory_bytes())

    def _has_room(self) -> bool:
        if self._runner is None or self._own.stopping:
            return False
        # What must run alone fills the replica; the wake-ups that come meanwhile are kept.
        alone = self._runner.runs and self._runner.held_back
        return not alone and len(self._runner.runs) < self.plan.stage.engine_args.max_num_seqs

    def _wake_self(self, times: int) -> None:
        for _ in range(min(times, _WAKES_AT_ONCE)):
            if not self._broker.wake(self.plan.name, "-", 0):
                return

    def _return_strays(self) -> None:
        if self._runner is not None:
            self._runner.return_strays()
