"""The replica: the life of this process from loading to its end, and the parts it is made of.

loading → ready → draining → gone, or failed with the reason. Celery's signals (``workers.celery``)
move it on; here is what each move means. Does not know Celery's API.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from typing import Any

import psutil

from configs.devices import Machine
from configs.errors import GenerationError
from configs.settings import Settings
from configs.stages import ReplicaPlan
from routing.claims import Claims
from routing.connection import connect
from routing.registry import Drain, Model
from routing.replica import Heartbeat as Mark
from routing.replica import ReplicaState
from routing.router import Router
from workers.heartbeat import Heartbeat, Reactions
from workers.reporter import Reporter
from workers.run import Stop

EXIT_DEVICE = 4  # the device answers no more; a new process may have it back
_LAST_RUNS_S = 10.0  # a run that hangs in the device is left to the sweep
_LOOK_S = 0.05
_logger = logging.getLogger(__name__)
_current: Replica | None = None


def current() -> Replica:
    """Return the replica this process is.

    Raises:
        RuntimeError: It is none: it was not started as a worker with ``-Q replica<number>``.
    """
    if _current is None:
        raise RuntimeError(
            "this process is no replica; start it by: celery -A workers worker -Q replica0"
        )
    return _current


def become(replica: Replica) -> Replica:
    """Make this process a replica, for as long as it lives."""
    global _current  # noqa: PLW0603 - one process is one replica, and Celery's hooks take no argument
    _current = replica
    return replica


class Replica:
    """One replica of one stage, in this process.

    Attributes:
        node: Its Celery node name.
        exit_code: That of the process, once it has nothing more to do.
    """

    def __init__(self, plan: ReplicaPlan, settings: Settings, machine: Machine) -> None:
        """Connect to nothing yet."""
        self.plan = plan
        self.node = f"{plan.name}@{socket.gethostname()}"
        self.exit_code: int | None = None
        self._settings = settings
        self._machine = machine
        self._started_at = time.time()
        self._incarnation = f"{int(self._started_at * 1000):013d}-{secrets.token_hex(4)}"
        self._state = ReplicaState.LOADING
        self._error: str | None = None
        self._stopping = False
        self._drain: Drain | None = None
        self._drain_s = settings.drain_s
        self._hand_back_at = 0.0
        self._process = psutil.Process()
        redis = connect(settings.redis_url)
        self._router = Router.open(settings, redis)
        self._claims: Claims = self._router.claims
        self._runner: Any = None
        self._heartbeat = Heartbeat(
            self._router.registry,
            self._mark,
            settings.heartbeat_s,
            Reactions(
                stuck=self._is_stuck,
                has_room=self._has_room,
                wake=self._wake_self,
                return_strays=self._return_strays,
                heed=self._heed,
                superseded=self._superseded,
            ),
        )
        self._reporter = Reporter(
            self._claims,
            self._router.store.get,
            lambda: self._runner.runs.values() if self._runner else (),
        )

    def load(self) -> None:
        """Load and warm up the pipeline, with the heartbeat saying so.

        Raises:
            GenerationError: It could not be loaded or warmed up; the registry keeps the reason.
        """
        self._heartbeat.start()
        # Here, since torch must not be imported before the device chunk is set.
        from workers.engine import Engine
        from workers.output_writer import OutputWriter
        from workers.runner import Runner

        try:
            engine = Engine.load(self.plan)
            engine.warm_up()
        except GenerationError as error:
            self._state, self._error = ReplicaState.FAILED, str(error)
            self._heartbeat.stop()
            raise
        self._router.registry.publish_model(
            Model(self.plan.stage.model_name, self.plan.stage.stage_id, engine.abilities)
        )
        self._runner = Runner(
            name=self.plan.name,
            incarnation=self._incarnation,
            engine=engine,
            claims=self._claims,
            writer=OutputWriter(self._router.outputs, self._settings.output_metadata),
            broker=self._router.broker,
            on_progress=self._reporter.wake,
            on_device_lost=self._lose_device,
            preview_every_s=self._settings.preview_every_s,
        )
        self._reporter.start()
        engine.watch_devices(self._lose_device)

    def open(self) -> None:
        """Join the rotation: the queue is being read from now on."""
        self._state = ReplicaState.READY
        self._heartbeat.beat_now()
        _logger.info(
            "%s is ready: %s on %s", self.plan.name, self.plan.stage.model_name, self.plan.devices
        )

    def run_next(self) -> str | None:
        """Run the first request of the line; its id, or None where nothing waited."""
        ran: str | None = self._runner.run_next()
        return ran

    def cancel(self, request_id: str, attempt: int) -> bool:
        """Stop a run at its next step; False where it does not run here."""
        run = self._runner.runs.get(request_id) if self._runner else None
        if run is None or run.request.attempt != attempt:
            return False
        run.stop(Stop.CANCELED)
        return True

    def refresh(self, request_id: str, attempt: int) -> bool:
        """Have a run's record read again; False where it does not run here."""
        run = self._runner.runs.get(request_id) if self._runner else None
        if run is None or run.request.attempt != attempt:
            return False
        self._reporter.wake()
        return True

    def beat_now(self) -> None:
        """Write a heartbeat without waiting for the next turn."""
        self._heartbeat.beat_now()

    def stop(self) -> None:
        """Begin to end: leave the rotation now, hand what runs back after its time to drain.

        Called in a signal handler: it only sets flags and starts a timer.
        """
        # A second signal is somebody in more of a hurry than the operator was.
        drain_s, self._drain_s = self._drain_s, self._settings.drain_s
        self._stopping = True
        self._state = ReplicaState.DRAINING
        self._heartbeat.beat_now()
        if self._runner is not None:
            self._runner.closed.set()
            timer = threading.Timer(drain_s, self._runner.stop_all, args=(Stop.HAND_BACK,))
            timer.daemon = True
            timer.start()

    def close(self, exit_code: int) -> None:
        """End: the runs are over, the registry is told; a failed one has told its reason before."""
        if self._state is ReplicaState.FAILED:
            return
        if self._runner is not None:
            self._reporter.stop()
            self._runner.engine.close()
        self._state = ReplicaState.GONE
        self._heartbeat.stop()
        self.exit_code = exit_code

    def _has_room(self) -> bool:
        room = self.plan.stage.engine_args.max_num_seqs
        return self._runner is not None and not self._stopping and len(self._runner.runs) < room

    def _wake_self(self) -> None:
        self._router.broker.wake(self.plan.name, "-", 0)

    def _return_strays(self) -> None:
        if self._runner is not None:
            self._runner.return_strays()

    def _heed(self, drain: Drain | None) -> None:
        """Do what an operator wants: hand back what runs in time, and end if that is the wish."""
        if drain is None or self._runner is None or self._stopping:
            self._drain = None
            return
        if drain != self._drain:
            self._drain = drain
            self._hand_back_at = time.monotonic() + drain.seconds
            _logger.info("%s drains; what runs may take %g s more", self.plan.name, drain.seconds)
        if drain.ends:
            _logger.warning("%s ends as it was told, to be started again", self.plan.name)
            self._stopping, self._drain_s = True, drain.seconds
            os.kill(os.getpid(), signal.SIGTERM)
        elif time.monotonic() >= self._hand_back_at:
            self._runner.hand_back_all()

    def _superseded(self) -> None:
        _logger.critical("another process has become %s; this one ends", self.plan.name)
        if self._runner is not None:
            self._runner.stop_all(Stop.LOST)
        os.kill(os.getpid(), signal.SIGTERM)

    def _lose_device(self, why: str) -> None:
        """Leave the rotation, and end once the other runs have been handed back too."""
        if self._error is None:
            self._error = f"{why}; the process was ended"
            self._stopping, self._state = True, ReplicaState.DRAINING
            self._runner.closed.set()
            self._heartbeat.beat_now()
            threading.Thread(target=self._end_without_device, name="end", daemon=True).start()

    def _end_without_device(self) -> None:
        deadline = time.monotonic() + _LAST_RUNS_S
        while self._runner.runs and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        # Only now: the sweep takes what a failed replica still runs for crashed.
        self._state = ReplicaState.FAILED
        self._heartbeat.stop()
        _logger.critical("%s: %s", self.plan.name, self._error)
        # Not by way of torch, whose teardown calls the device.
        os._exit(EXIT_DEVICE)

    def _is_stuck(self) -> bool:
        """Whether a run has not moved for too long; the replica has failed then."""
        limit_s = self._settings.stuck_after_s
        runs = list(self._runner.runs.values()) if self._runner else []
        for run in runs:
            if time.monotonic() - run.moved_at > limit_s:
                self._state = ReplicaState.FAILED
                self._error = (
                    f"no step moved for {limit_s:g} s (STUCK_AFTER_S) at step {run.step} of "
                    f"{run.steps} of {run.request.id}; the process was ended"
                )
                _logger.critical("%s: %s", self.plan.name, self._error)
                return True
        return False

    def _mark(self) -> Mark:
        stage = self.plan.stage
        engine = self._runner.engine if self._runner else None
        return Mark(
            name=self.plan.name,
            incarnation=self._incarnation,
            stage=stage.stage_id,
            model=stage.model_name,
            state=self._state,
            node=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=self.plan.devices,
            device_kind=self._machine.kind_for(stage),
            capacity=stage.engine_args.max_num_seqs,
            started_at=self._started_at,
            step_s=self._runner.step_s if self._runner else None,
            memory_bytes=self._process.memory_info().rss,
            device_memory_bytes=engine.device_memory_bytes() if engine else None,
            stopping=self._stopping,
            error=self._error,
        )
