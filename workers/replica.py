"""The replica: the life of this process from loading to its end, and the parts it is made of."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Final

from configs.errors import GenerationError, ModelLoadFailed
from configs.machine import Machine
from configs.settings import Settings
from configs.stage_config import ReplicaPlan
from routing.broker import Broker
from routing.claims import Claims
from routing.connection import connect
from routing.outputs import OutputStore
from routing.records import Records
from routing.replica import DrainCommand, Heartbeat, LoadedModel, Registry, ReplicaState
from workers.heartbeat import HeartbeatThread, ReplicaLife
from workers.progress import Reporter, RunningRequest, Stop

if TYPE_CHECKING:  # it brings torch, which must not come before the device chunk is set
    from workers.runner import Runner

EXIT_DEVICE: Final = 4  # the device is lost; a new process may have it back
_WAKES_AT_ONCE: Final = 100  # the heartbeat has other things to do; the next one goes on
_LAST_RUNS_S: Final = 10.0  # a run that hangs in the device is left to the sweep
_LOOK_S: Final = 0.05
_logger = logging.getLogger(__name__)


_current: ReplicaProcess | None = None


def current() -> ReplicaProcess:
    """Return the replica that this process is.

    Raises:
        RuntimeError: It was not started as a worker with ``-Q replica<number>``.
    """
    if _current is None:
        raise RuntimeError(
            "this process is not a replica; start one with: celery -A workers worker -Q replica0"
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
        node: Its Celery node name.
        runner: What runs its requests, once the pipeline is loaded.
        heartbeats: The thread that tells the registry.
    """

    def __init__(self, plan: ReplicaPlan, settings: Settings, machine: Machine) -> None:
        """Connect to nothing yet.

        Raises:
            ValueError: ``OUTPUTS_URL`` is of a file system that is not known.
        """
        self.plan = plan
        self.exit_code: int | None = None
        self.runner: Runner | None = None
        self._settings = settings
        self._life = ReplicaLife(plan, machine)
        self.node = self._life.node
        redis = connect(settings.redis_url)
        self._registry = Registry(settings, redis)
        self._claims = Claims(settings, redis)
        self._broker = Broker(settings)
        self._outputs = OutputStore(settings.outputs_url)
        self._runs: dict[str, RunningRequest] = {}
        self._reporter = Reporter(self._claims, Records(settings, redis).get, self._runs)
        self.heartbeats = HeartbeatThread(self._registry, self, settings.heartbeat_s)
        self._drain_s = settings.drain_s
        self._command: DrainCommand | None = None
        self._hand_back_at = 0.0

    def load(self) -> None:
        """Load and warm up the pipeline, with the heartbeat saying so.

        Raises:
            GenerationError: It could not be loaded or warmed up; the registry keeps the reason.
        """
        self.heartbeats.start()
        # Here, since torch must not be imported before the device chunk is set. What imports make
        # stays: not to look for garbage in it, now or later, saves CPU time at the start.
        gc.disable()
        from workers.engine.engine import Engine
        from workers.outputs import OutputWriter
        from workers.runner import Runner

        gc.freeze()
        gc.enable()

        stage, settings = self.plan.stage, self._settings
        try:
            engine = Engine.load(self.plan, self._life.tell)
            engine.warm_up(self._life.tell)
        except GenerationError as error:
            lasting = isinstance(error, ModelLoadFailed) and error.lasting
            self._life.fail(str(error), lasting=lasting)
            self.heartbeats.stop()
            raise
        self._registry.publish_model(
            LoadedModel(stage.model_name, stage.stage_id, engine.abilities, stage.model_names[1:])
        )
        self.runner = Runner(
            name=self.plan.name,
            incarnation=self._life.incarnation,
            engine=engine,
            claims=self._claims,
            writer=OutputWriter(self._outputs, settings.output_metadata),
            broker=self._broker,
            reporter=self._reporter,
            runs=self._runs,
            on_device_lost=self._lose_device,
            capacity=stage.engine_args.max_num_seqs,
            preview_every_s=settings.preview_every_s,
        )
        self._reporter.start()
        engine.watch_devices(self._lose_device)

    def open(self) -> None:
        """Join the rotation: the queue is read from now on."""
        self._life.state = ReplicaState.READY
        self.heartbeats.send_now()
        self.wake_self(1)  # requests may wait for other replicas
        _logger.info(
            "%s is ready: %s on %s", self.plan.name, self.plan.stage.model_name, self.plan.devices
        )

    def stop(self) -> None:
        """Begin to end: leave the rotation now, hand what runs back after its time to drain.

        Called in a signal handler: it only sets flags and starts a timer.
        """
        self._life.leave()
        self.heartbeats.send_now()
        # A second signal is somebody in more of a hurry than the operator was.
        drain_s, self._drain_s = self._drain_s, self._settings.drain_s
        if self.runner is not None:
            self.runner.closed.set()
            timer = threading.Timer(drain_s, self.runner.stop_all, args=(Stop.HAND_BACK,))
            timer.daemon = True
            timer.start()

    def close(self, exit_code: int) -> None:
        """End: the runs are over, the registry is told; a failed one has told its reason before."""
        if self._life.state is ReplicaState.FAILED:
            return
        if self.runner is not None:
            self.runner.finish()
            self._reporter.stop()
            self.runner.engine.close()
        self._life.state = ReplicaState.GONE
        self.heartbeats.stop()
        self.exit_code = exit_code

    def heartbeat(self) -> Heartbeat:
        if self.runner is None:
            return self._life.heartbeat(None, None)
        return self._life.heartbeat(self.runner.step_s, self.runner.engine.device_memory_bytes())

    def is_stuck(self) -> bool:
        """Tell whether a run has not moved for ``STUCK_AFTER_S``; the replica has failed then."""
        limit_s = self._settings.stuck_after_s
        for run in list(self._runs.values()):
            if time.monotonic() - run.moved_at > limit_s:
                self._life.fail(
                    f"{run.request.id} made no step for {limit_s:g} s (STUCK_AFTER_S) at step "
                    f"{run.step} of {run.steps}; the process was ended"
                )
                _logger.critical("%s: %s", self.plan.name, self._life.error)
                return True
        return False

    def has_room(self) -> bool:
        return self.runner is not None and not self._life.stopping and self.runner.has_room()

    def wake_self(self, times: int) -> None:
        """Send this replica so many wake-ups, as far as the broker takes them."""
        for _ in range(min(times, _WAKES_AT_ONCE)):
            if not self._broker.wake(self.plan.name, "-", 0):
                return

    def return_orphaned_claims(self) -> None:
        if self.runner is not None:
            self.runner.return_orphaned_claims()

    def obey(self, command: DrainCommand | None) -> None:
        """Do what an operator wants: hand back what runs in time, and end where it says so."""
        if command is None or self.runner is None or self._life.stopping:
            self._command = None
            return
        name = self.plan.name
        if command != self._command:
            self._command = command
            self._hand_back_at = time.monotonic() + command.seconds
            _logger.info("%s drains; what runs may take %g s more", name, command.seconds)
        if command.ends:
            _logger.warning("%s ends by an operator's command, to be started again", name)
            self._life.stopping, self._drain_s = True, command.seconds
            os.kill(os.getpid(), signal.SIGTERM)
        elif time.monotonic() >= self._hand_back_at:
            self.runner.hand_back_all()

    def superseded(self) -> None:
        """Let everything go: it is another process's."""
        _logger.critical("another process has become %s; this one ends", self.plan.name)
        if self.runner is not None:
            self.runner.stop_all(Stop.LOST)
        os.kill(os.getpid(), signal.SIGTERM)

    def _lose_device(self, why: str) -> None:
        """Leave the rotation, and end once the other runs have been handed back too."""
        if self._life.error is None and self.runner is not None:
            self._life.error = f"{why}; the process was ended"
            self._life.leave()
            self.runner.closed.set()
            self.heartbeats.send_now()
            threading.Thread(target=self._end_without_device, name="end", daemon=True).start()

    def _end_without_device(self) -> None:
        # Looked at, and not told: the runs end in threads that may hang in the device.
        deadline = time.monotonic() + _LAST_RUNS_S
        while self._runs and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        # Only now: the sweep takes what a failed replica still runs for crashed.
        self._life.state = ReplicaState.FAILED
        self.heartbeats.stop()
        _logger.critical("%s: %s", self.plan.name, self._life.error)
        # Not by way of torch, whose teardown calls the device.
        os._exit(EXIT_DEVICE)
