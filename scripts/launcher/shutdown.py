"""The end of all parts: asked in order, killed when their grace is over, none left behind.

Does not know what the parts are; their plans say in which order they end and how long each may be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scripts.launcher.supervisor import Member

OUTLIVE_S = 0.4  # how long a part that lingers may outlive the ones it lingered for
HURRY_S = 1.0  # every grace, once somebody has asked a second time
_KILL_S = 1.0
_PAUSE_S = 0.02


@dataclass(frozen=True)
class Shutdown:
    """How the parts are brought to their end.

    Attributes:
        hurried: Whether somebody has asked a second time.
        say: Prints one line to people.
        clock: Seconds that never go back.
        sleep: Waits for so many seconds.
    """

    hurried: Callable[[], bool]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def stop(self, members: Sequence[Member]) -> None:
        """End all parts: in their order, and the ones of one order together.

        A part that lingers goes on while the next ones end: the API still answers the clients that
        wait for what the replicas finish. What is idle ends at once, so that the graces are rare.
        """
        lingering: list[Member] = []
        for order in sorted({member.part.stop_order for member in members}):
            row = [member for member in members if member.part.stop_order == order]
            for member in row:
                if member.process is not None:
                    member.process.terminate()
            self._wait(row, max(member.part.grace_s for member in row))
            self._wait(lingering, OUTLIVE_S)
            self._kill([*lingering, *(member for member in row if not member.part.lingers)])
            lingering = [member for member in row if member.part.lingers]
        self._kill(lingering)

    def _wait(self, members: Sequence[Member], seconds: float) -> None:
        started = self.clock()
        while any(_runs(member) for member in members):
            if self.clock() - started >= (min(seconds, HURRY_S) if self.hurried() else seconds):
                return
            self.sleep(_PAUSE_S)

    def _kill(self, members: Sequence[Member]) -> None:
        late = [member for member in members if _runs(member)]
        for member in late:
            if member.process is not None:
                self.say(f"{member.part.name} did not end in time and is killed")
                member.process.kill()
        self._wait(late, _KILL_S)


def _runs(member: Member) -> bool:
    return member.process is not None and member.process.poll() is None
