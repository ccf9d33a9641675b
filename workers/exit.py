"""The demise of a replica: how a process that cannot go on says so, and ends itself.

Where no step moves, where its device is lost, and where another process has taken its name. Does
not know how it is started again.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from routing.replica import ReplicaState
from workers.heartbeat import HeartbeatThread, ReplicaMark
from workers.progress import Run, Stop

_logger = logging.getLogger(__name__)


if TYPE_CHECKING:  # it brings torch, which must not come before the device chunk is set
    from workers.runner import Runner


EXIT_DEVICE = 4  # the device answers no more; a new process may have it back


_LAST_RUNS_S = 10.0  # a run that hangs in the device is left to the sweep


_LOOK_S = 0.05


class Demise:
    """Ends this process where it must be.

    Attributes:
        runner: What runs here, once the pipeline is loaded.
    """

    def __init__(self, name: str, mark: ReplicaMark) -> None:
        self.runner: Runner | None = None
        self._name = name
        self._mark = mark

    def is_stuck(self, limit_s: float) -> bool:
        """Whether a run has not moved for longer than ``limit_s``; the replica has failed then."""
        for run in list(self.runner.runs.values()) if self.runner else ():
            if time.monotonic() - run.moved_at > limit_s:
                self._mark.fail(_stuck(run, limit_s))
                _logger.critical("%s: %s", self._name, self._mark.error)
                return True
        return False

    def superseded(self) -> None:
        """Let everything go: it is another process's."""
        _logger.critical("another process has become %s; this one ends", self._name)
        if self.runner is not None:
            self.runner.stop_all(Stop.LOST)
        os.kill(os.getpid(), signal.SIGTERM)

    def lose_device(self, why: str, runner: Runner, heartbeat: HeartbeatThread) -> None:
        """Leave the rotation, and end once the other runs have been handed back too."""
        if self._mark.error is None:
            self._mark.error = f"{why}; the process was ended"
            self._mark.leave()
            runner.closed.set()
            heartbeat.heartbeat_now()
            threading.Thread(
                target=self._end_without_device, args=(runner, heartbeat), name="end", daemon=True
            ).start()

    def _end_without_device(self, runner: Runner, heartbeat: HeartbeatThread) -> None:
        # Looked at, and not told: the runs end in threads that may hang in the device.
        deadline = time.monotonic() + _LAST_RUNS_S
        while runner.runs and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        # Only now: the sweep takes what a failed replica still runs for crashed.
        self._mark.state = ReplicaState.FAILED
        heartbeat.stop()
        _logger.critical("%s: %s", self._name, self._mark.error)
        # Not by way of torch, whose teardown calls the device.
        os._exit(EXIT_DEVICE)


def _stuck(run: Run, limit_s: float) -> str:
    return (
        f"no step moved for {limit_s:g} s (STUCK_AFTER_S) at step {run.step} of "
        f"{run.steps} of {run.request.id}; the process was ended"
    )
