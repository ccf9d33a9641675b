"""A running service for the tests: real workers and a real API, one process each, on free ports."""

from __future__ import annotations

import io
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from configs.settings import REPOSITORY
from tests.e2e.preloaded import PreloadedProcess
from tests.redis_server import free_port
from tests.waiting import wait_until

READY_S = 90.0
LOOK_S = 0.1  # at a replica that loads: more often would take the processor from it
STOP_S = 30.0
RUN_S = 60.0
HELD_CALLS = 4
HEARTBEAT_EXPIRY_S = 3.0
WEBHOOK_SECRET = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def image(self) -> Image.Image:
        return Image.open(io.BytesIO(self.content))


@dataclass
class Service:
    """Replicas by the bare Celery command line, and one API of two processes."""

    redis_url: str
    redis_prefix: str
    folder: Path
    stage_file: Path = REPOSITORY / "configs" / "tiny_cpu.yaml"
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.outputs = self.folder / "outputs"
        self._affinity: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[bytes] | PreloadedProcess] = {}

    def start(self, *replicas: str) -> None:
        """Start everything and return once all is ready."""
        for name in replicas:
            self.start_replica(name)
        self.start_api()
        for name in replicas:
            self.wait_for(name, "ready")

    def start_api(self) -> None:
        """Start the API and return once it answers."""
        self._run("api", {}, "-m", "gunicorn", "--config", "python:api.server")
        wait_until(lambda: self.call("GET", "/health").status == 200, READY_S, "the API", LOOK_S)

    def start_replica(self, name: str, environ: Mapping[str, str] | None = None) -> None:
        """Start one replica: what the line runs that the README gives."""
        own, log = self._environ(environ or {}), self.folder / f"{name}.log"
        command = ["celery", "-A", "workers", "worker", "-Q", name]
        self.processes[name] = PreloadedProcess(command, own, log)

    def wait_for(self, name: str, *states: str) -> dict[str, Any]:
        """Return a replica once it is in one of the states."""

        def look() -> Any:
            answer = self.call("GET", f"/v1/replicas/{name}")
            # The mark of a process that was killed stands until it expires: not that one.
            if answer.status != 200 or answer.json["pid"] != self.processes[name].pid:
                return None
            return answer.json if answer.json["state"] in states else None

        try:
            found: dict[str, Any] = wait_until(
                look, READY_S, f"{name} to be {states}", pause_s=LOOK_S
            )
        except AssertionError as late:
            raise AssertionError(f"{late}; its log ends: {self.log(name)}") from None
        return found

    def end(self, name: str, how: signal.Signals, timeout_s: float = STOP_S) -> int:
        """Send a signal to a process and wait for its end; returns its exit code."""
        process = self.processes.pop(name)
        process.send_signal(how)
        return process.wait(timeout_s)

    def stop(self) -> None:
        """End everything that still runs."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)

    def log(self, name: str) -> str:
        """Return the end of what a process has printed."""
        return self.whole_log(name)[-2000:] or "(no log)"

    def whole_log(self, name: str) -> str:
        """Return all that a process has printed, and those of its name before it."""
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 70,
    ) -> Answer:
        """Make one HTTP call; errors are answers too."""
        data = None if body is None else json.dumps(body).encode()
        key = self.environ.get("API_KEY")
        own = {"Authorization": f"Bearer {key}"} if key else {}
        all_headers = {"Content-Type": "application/json", **own, **(headers or {})}
        request = urllib.request.Request(
            self.url + path, data=data, headers=all_headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return Answer(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers), error.read())

    def submit(self, prompt: str = "a red circle on a blue background", **fields: Any) -> Any:
        """Submit a request that must be accepted; returns its object."""
        answer = self.call("POST", "/v1/requests", {"prompt": prompt, **fields})
        assert answer.status == 202, answer.content
        return answer.json

    def submit_all(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        """Submit all at the same time, each on a connection of its own."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.call("POST", "/v1/requests", body), bodies))

    def submit_to(self, replica: str, prompt: str, **fields: Any) -> Any:
        """Submit by an affinity key of ``replica``, which holds it there while it waits."""
        for number in range(8):
            key = self._affinity.get(replica, f"{replica} {number}")
            request = self.submit(prompt, affinity_key=key, **fields)
            if request["replica"] == replica:
                self._affinity[replica] = key
                return request
            self._affinity.pop(replica, None)
            self.call("DELETE", f"/v1/requests/{request['id']}")
        raise AssertionError(f"no key leads to {replica}")

    def get(self, request_id: str) -> Any:
        """Return a request as it stands."""
        return self.call("GET", f"/v1/requests/{request_id}").json

    def ended(self, request_id: str) -> Any:
        """Return a request once it has ended; a busy machine may take several held calls."""
        for _ in range(HELD_CALLS):
            answer = self.call(
                "GET", f"/v1/requests/{request_id}", headers={"Prefer": f"wait={RUN_S:.0f}"}
            )
            if answer.json["status"] not in {"queued", "running"}:
                return answer.json
        raise AssertionError(f"it has not ended: {answer.json}")

    def at_step(self, request_id: str, step: int) -> Any:
        """Return a request once ``step`` of its steps are done."""

        def look() -> Any:
            request = self.get(request_id)
            return request if request["progress"]["step"] >= step else None

        return wait_until(look, RUN_S, f"step {step} of {request_id}")

    def output(self, request: Any, index: int = 0) -> Answer:
        """Fetch a file of a request that has succeeded."""
        assert request["status"] == "succeeded", request
        return self.call("GET", request["outputs"][index]["url"])

    def files(self, request_id: str) -> list[str]:
        """Return the files there are for a request, temporary ones too."""
        folder = self.outputs / request_id
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def _environ(self, own: Mapping[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            "REDIS_URL": self.redis_url,
            "REDIS_PREFIX": self.redis_prefix,
            "OUTPUTS_URL": str(self.outputs),
            "RUN_DIR": str(self.folder),
            "STAGE_CONFIGS_PATH": str(self.stage_file),
            "API_PORT": str(self.port),
            "HEARTBEAT_S": "0.5",
            "HEARTBEAT_EXPIRY_S": str(HEARTBEAT_EXPIRY_S),
            "SWEEP_S": "0.5",
            "DRAIN_S": "1",
            "AFFINITY_PATIENCE_S": "600",
            "WEBHOOK_SECRET": WEBHOOK_SECRET,
            **self.environ,
            **own,
        }

    def _run(self, name: str, own: Mapping[str, str], *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=REPOSITORY,
                env=self._environ(own),
                stdout=log,
                stderr=subprocess.STDOUT,
            )


@contextmanager
def running_alone(redis_url: str, folder: Path, **engine_args: Any) -> Iterator[Service]:
    """Run the bundled model on one replica, with these `engine_args` besides its own."""
    document = yaml.safe_load((REPOSITORY / "configs" / "tiny_cpu.yaml").read_text())
    (stage,) = document["stages"]
    stage["runtime"].update(devices="0", num_replicas=1)
    stage["engine_args"].update(engine_args)
    stage_file = folder / "stages.yaml"
    stage_file.write_text(yaml.safe_dump(document))
    service = Service(redis_url, f"e2e-{secrets.token_hex(4)}:", folder, stage_file)
    try:
        service.start("replica0")
        yield service
    finally:
        service.stop()
