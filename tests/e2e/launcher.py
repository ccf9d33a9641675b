"""``python -m scripts.serve`` for the tests: on free ports, over a folder of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from redis import Redis

from configs.settings import REPOSITORY, Settings
from routing.keys import Keys
from routing.request import ACTIVE
from tests.e2e.started import started_in
from tests.redis_server import free_port
from tests.waiting import wait_until

READY_S = 120.0
ENDED_MINUTES = 5
REFUSED_S = 30.0
ROLL_S = 240.0


class Launcher:
    """One launcher; :meth:`left` finds whatever it or its parts have left behind."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._console = folder / "console"
        self.environ = {
            **{name: value for name, value in os.environ.items() if name != "REDIS_URL"},
            "RUN_DIR": str(folder / "run"),
            "FLOWER_PORT": str(free_port()),
            **environ,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        """Start, and return once it has said where everything is."""
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                self._command(arguments),
                cwd=REPOSITORY,
                env=self.environ,
                stdout=console,
                stderr=subprocess.STDOUT,
            )
        self.wait_for("Ctrl-C stops everything.")

    def wait_for(self, text: str, count: int = 1) -> None:
        """Return once the console has shown the text so many times."""

        def shown() -> bool:
            if self.console().count(text) >= count:
                return True
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the launcher ended; it said: {self.console()}")
            return False

        try:
            wait_until(shown, READY_S, f"{text!r}")
        except AssertionError as late:
            raise AssertionError(f"{late}; it said: {self.console()}") from None

    def refused(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Start it where it must not start; returns what it said and its exit code."""
        return subprocess.run(
            self._command(arguments),
            cwd=REPOSITORY,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=REFUSED_S,
            check=False,
        )

    def end(self, how: signal.Signals, timeout_s: float) -> int:
        """Send it a signal and wait for its end; returns its exit code."""
        assert self._process is not None
        self._process.send_signal(how)
        status = self._process.wait(timeout_s)
        self._process = None
        return status

    def close(self) -> None:
        """End whatever still runs."""
        if self._process is not None:
            self.end(signal.SIGTERM, 15)

    def console(self) -> str:
        """Return all it has said."""
        return self._console.read_text() if self._console.exists() else ""

    def logs(self) -> str:
        """Return the console and what the parts have logged, each its last lines."""
        files = [self._console, *sorted(Path(self.environ["RUN_DIR"]).glob("logs/*.log"))]
        return "\n".join(f"== {each.name}\n{each.read_text()[-8000:]}" for each in files)

    def started(self) -> Iterator[psutil.Process]:
        """Yield the living processes of this launcher, itself too."""
        return started_in(Path(self.environ["RUN_DIR"]))

    def left(self) -> list[str]:
        """Return their command lines."""
        lines = []
        for process in self.started():
            with suppress(psutil.Error):  # it has ended meanwhile
                lines.append(" ".join(process.cmdline()))
        return lines

    def call(self, path: str, body: Any = None, wait_s: int = 0) -> Any:
        """Make one HTTP call, held for ``wait_s`` seconds at most, and return its JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Prefer": f"wait={wait_s}"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=wait_s + 10) as answer:
            return json.load(answer)

    def submit(self, steps: int) -> str:
        """Submit a request without waiting for it; returns its id."""
        body = {"prompt": "a blue star on a white background", "num_inference_steps": steps}
        identifier: str = self.call("/v1/requests", body)["id"]
        return identifier

    def run(self, prompt: str, **fields: Any) -> Any:
        """Submit a request and return it once it has ended."""
        return self.call("/v1/requests", {"prompt": prompt, **fields}, wait_s=60)

    def ended(self, request_id: str) -> Any:
        """Return a request once it has ended."""
        answer = None
        for _ in range(ENDED_MINUTES):
            answer = self.call(f"/v1/requests/{request_id}", wait_s=60)
            if answer["status"] not in ACTIVE:
                break
        return answer

    def crashes(self, request_id: str) -> int:
        """Return how many crashes a request was in flight in, as its record says."""
        found = re.search(r"redis ready: \S+ \S+ on 127\.0\.0\.1:(\d+)", self.console())
        assert found is not None
        with Redis(port=int(found.group(1)), decode_responses=True) as client:
            crashes = client.hget(Keys(Settings().redis_prefix).request(request_id), "crashes")
        assert crashes is not None
        return int(str(crashes))

    def replica(self, name: str) -> Any:
        """Return a replica as the API shows it."""
        return self.call(f"/v1/replicas/{name}")

    def _command(self, arguments: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "scripts.serve", "--port", str(self.port), *arguments]


def roll_command(url: str, *arguments: str) -> list[str]:
    """The command that restarts the replicas of a service one by one."""
    return [sys.executable, "-m", "scripts.rolling_restart", "--url", url, *arguments]


def roll_replicas(url: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end; returns what it said and its exit code."""
    return subprocess.run(
        roll_command(url, *arguments),
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        timeout=ROLL_S,
        check=False,
    )
