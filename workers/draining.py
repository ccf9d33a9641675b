"""The draining of a replica: what runs may take its time, and is handed back after it.

Asked for by an operator, for a while or to end, and by the signal that ends the process. Does not
know how the registry carries the wish, nor how a process ends.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from routing.registry import Drain
from workers.replica_mark import ReplicaMark
from workers.run import Stop

if TYPE_CHECKING:  # it brings torch, which must not come before the device chunk is set
    from workers.runner import Runner

_logger = logging.getLogger(__name__)


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
        self._wish: Drain | None = None
        self._hand_back_at = 0.0

    def heed(self, wish: Drain | None) -> None:
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
