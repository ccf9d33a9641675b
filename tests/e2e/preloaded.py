"""Replicas whose process has imported torch and diffusers already.

To import them takes a replica longer than all that most tests ask of it, and the tests start it a
hundred times. So a process that has done so and nothing else is forked, and from there runs what
the command line runs. The launcher's replicas are started by the bare command line.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from configs.settings import REPOSITORY

FORKS: Final = get_context("forkserver")
FORKS.set_forkserver_preload(["tests.e2e.imports"])


class PreloadedProcess:
    """``python -m`` some module, with the part of subprocess.Popen that tests use."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.args = list(arguments)
        self._process = FORKS.Process(target=_run, args=(self.args, dict(environ), log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], environ: dict[str, str], log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(REPOSITORY)
    if "PYTHONPATH" in environ:
        sys.path[:0] = environ["PYTHONPATH"].split(os.pathsep)
        site.execsitecustomize()
    module, *sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        # An interpreter does so at its end, a fork does not.
        atexit._run_exitfuncs()  # noqa: SLF001
