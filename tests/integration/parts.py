"""Parts of a service that do nothing but what each test needs, under a real supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from scripts.launcher.parts import Part
from scripts.launcher.supervisor import Shutdown, SupervisedPart, Supervisor
from tests.waiting import wait_until

SOON_S = 10.0


RUN = "signal.pause()"


# SIGTERM is not heard.
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


# Notes its name in the file `ended` when it is asked to end.
NOTE_END = """
def end(*_):
    with open('ended', 'a') as file: file.write(name + ' ')
    os._exit(0)
signal.signal(signal.SIGTERM, end)
"""


WITH_CHILD = """
child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
open('child', 'w').write(str(child.pid))
"""


class Parts:
    """A supervisor over a folder of its own, with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.said: list[str] = []
        self.supervisor = Supervisor(
            environment=dict(os.environ),
            folder=folder,
            logs=folder,
            say=self.said.append,
            clock=lambda: self.now,
        )

    def part(self, name: str, *code: str, **options: object) -> Part:
        """A part that runs the code; it is ready once the lines before the last have run."""
        *before, last = code
        lines = [
            "import os, signal, subprocess, sys",
            f"name = {name!r}",
            *before,
            "open(f'{name}.{os.getpid()}', 'w').close()",
            last,
        ]
        mark = self.folder / name
        part = Part(
            name=name,
            command=(sys.executable, "-c", "\n".join(lines)),
            ready=lambda pid: "here" if mark.with_suffix(f".{pid}").exists() else None,
        )
        return replace(part, **options)  # type: ignore[arg-type]

    def start(self, *parts: Part) -> list[SupervisedPart]:
        self.supervisor.start(parts)
        return self.supervisor.members

    def start_ready(self, *parts: Part) -> list[SupervisedPart]:
        members = self.start(*parts)
        self.look_until(lambda: all(member.ready for member in members), "the parts to be ready")
        return members

    def look_until(self, condition: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            self.supervisor.look()
            return condition()

        wait_until(look, SOON_S, f"{what}; said: {self.said}")

    def stop(self, hurried: bool = False) -> None:
        Shutdown(lambda: hurried, self.said.append).stop(self.supervisor.members)

    def ended(self) -> list[str]:
        return (self.folder / "ended").read_text().split()


def pid_of(member: SupervisedPart) -> int:
    assert member.process is not None
    return member.process.pid


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
