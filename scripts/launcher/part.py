"""A part of the service: how it is started, seen to be ready, explained when it fails, and stopped.

A plan only: nothing here runs. ``scripts/launcher/parts.py`` makes the parts of this service, and
``scripts/launcher/supervisor.py`` runs any.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def no_reason(_pid: int) -> str | None:
    """Return None: nothing is known about why the process failed."""
    return None


@dataclass(frozen=True)
class Part:
    """One process of the service.

    Attributes:
        name: ``redis``, ``replica0``, ``api``; also the name of its log.
        command: The command line, its first word a program.
        ready: Given the process id, says what is ready, or None while it is not; must return soon.
        failure: Given the process id, says why it failed, or None where that is not known.
        environment: Variables added to those of the launcher; one that is None is removed.
        stop_order: Parts with a lower number are asked to end before those with a higher one.
        grace_s: Seconds it has to end after it was asked to.
        lingers: Whether it may go on, after its grace, while the next in the order end.
        orphan_signal: What it is sent when the launcher dies without stopping it.
    """

    name: str
    command: tuple[str, ...]
    ready: Callable[[int], str | None]
    failure: Callable[[int], str | None] = no_reason
    environment: Mapping[str, str | None] = field(default_factory=dict)
    stop_order: int = 0
    grace_s: float = 5.0
    lingers: bool = False
    orphan_signal: signal.Signals = signal.SIGKILL
