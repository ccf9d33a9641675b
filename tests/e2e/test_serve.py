"""One command: what the launcher starts, says, refuses, restarts, and leaves behind: nothing."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import signal
import socket
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from standardwebhooks import Webhook

from configs.settings import REPOSITORY
from tests.e2e.launcher import Launcher, roll_replicas
from tests.integration.receiver import receiving
from tests.redis_server import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

STOP_S = 10.0
GONE_S = 30.0
PARTS = ("redis", "replica0", "replica1", "api", "webhooks", "flower")
SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"
LONG, SHORT = 300, 20
CLIENTS = 4
ONE_REPLICA = """
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {devices: "0", num_replicas: 1}
    engine_args: {model: "./models/tiny", device: cpu}
"""

NEVER_READY = """
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {{devices: "0", num_replicas: 1}}
    engine_args: {{model: "{broken}", device: cpu}}
  - stage_id: 1
    stage_type: diffusion
    runtime: {{devices: "1", num_replicas: 1}}
    engine_args: {{model: "./models/tiny", device: cpu}}
    default_sampling_params: {{width: 60, height: 64}}
"""
DEPLOY_FILE = """
pipeline: a_topology
async_chunk: false
stages:
  - stage_id: 0
    devices: "0"
    num_replicas: 2
    device: cpu
    gpu_memory_utilization: 0.9
    parallel_config: {tensor_parallel_size: 1, use_hsdp: false}
    default_sampling_params: {num_inference_steps: 2, width: 64, height: 64}
"""


@pytest.fixture(scope="module")
def launcher(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """The bundled model on two replicas, by the command without options; it runs."""
    launcher = Launcher(
        tmp_path_factory.mktemp("serve"),
        DRAIN_S="0.5",
        HEARTBEAT_S="0.5",
        HEARTBEAT_EXPIRY_S="30",  # a machine that stands still for a while kills no replica
        WEBHOOK_SECRET=SECRET,
        WEBHOOK_ALLOW_PRIVATE="true",
    )
    try:
        launcher.start()
        yield launcher
    finally:
        launcher.close()


@pytest.fixture
def another(redis_binary: str, tmp_path: Path) -> Iterator[Launcher]:
    """A launcher of the test's own, not started."""
    another = Launcher(tmp_path)
    yield another
    another.close()


def test_it_says_when_each_part_is_ready_and_then_where(launcher: Launcher) -> None:
    said = launcher.console()
    for part in PARTS:
        assert f"{part} ready: " in said
    assert "replica1 ready: tiny on cpu core 1, up in " in said
    assert said.index("replica1 ready") < said.index(f"page    {launcher.url}/")
    for replica in ("replica0", "replica1"):
        log = (launcher.folder / "run" / "logs" / f"{replica}.log").read_text()
        assert "no settings are known for" in log
    answer = launcher.run("a green ring on a black background")
    assert answer["status"] == "succeeded"
    outputs = launcher.folder / "run" / "outputs" / answer["id"]
    assert [file.suffix for file in outputs.iterdir()] == [".png"]


def test_a_webhook_tells_the_whole_way_of_a_request(launcher: Launcher) -> None:
    with receiving() as receiver:
        webhook = {"url": receiver.url, "events": ["started", "ended"]}
        request = launcher.run("a red circle on a blue background", webhook=webhook)
        wait_until(lambda: len(receiver.messages) == 2, 30, "two messages")
    # Messages of one request may overtake each other.
    verified = [Webhook(SECRET).verify(each.body, each.headers) for each in receiver.messages]
    told = {each["type"]: each["data"] for each in verified}
    assert set(told) == {"request.started", "request.succeeded"}
    assert {each["id"] for each in told.values()} == {request["id"]}
    assert told["request.succeeded"]["outputs"][0]["seed"] == request["parameters"]["seed"]


def test_redis_and_flower_listen_on_loopback_only(launcher: Launcher) -> None:
    listening = {
        connection.laddr.ip
        for process in launcher.started()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    names = " ".join(launcher.left())
    assert "redis-server" in names
    assert "flower" in names


def test_a_second_launcher_in_the_same_folder_is_refused(launcher: Launcher) -> None:
    refused = launcher.refused()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("Error: another launcher (pid ")
    assert refused.stderr.count("\n") == 1


def test_a_killed_redis_comes_back_with_its_data(launcher: Launcher) -> None:
    done = launcher.run("a red heart on a pink background")
    (redis,) = [p for p in launcher.started() if "redis" in p.name()]
    redis.kill()
    launcher.wait_for("redis ready: ", count=2)
    assert launcher.call(f"/v1/requests/{done['id']}")["status"] == "succeeded"
    answer = launcher.run("a red heart on a pink background")
    assert answer["status"] == "succeeded"


def test_all_replicas_are_replaced_under_load_and_no_request_fails(launcher: Launcher) -> None:
    before = {name: launcher.replica(name) for name in ("replica0", "replica1")}
    rolled = threading.Event()

    def client(number: int) -> list[dict[str, Any]]:
        """Submit one after the other, as long as the roll goes on; any refusal raises."""
        ended = []
        while not rolled.is_set():
            prompt = "a red circle on a blue background"
            steps = LONG if number == 0 else SHORT
            body = {"prompt": prompt, "seed": number, "num_inference_steps": steps}
            ended.append(launcher.call("/v1/requests", body, wait_s=60))
        return ended

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            roll = roll_replicas(launcher.url, "--drain-s", "0.5", "--timeout", "120")
        finally:
            rolled.set()
        answers = [answer for done in clients for answer in done.result()]
    assert roll.returncode == 0, (roll.stdout, roll.stderr)
    for name in before:
        assert f"{name}: restarting" in roll.stdout
        assert f"{name}: its new process is ready, after " in roll.stdout
    assert roll.stdout.index("replica0: its new process is ready") < roll.stdout.index("replica1:")
    assert "restarted 2 in " in roll.stdout
    ended = [launcher.ended(answer["id"]) for answer in answers]
    assert {(request["status"], request["error"]) for request in ended} == {("succeeded", None)}
    assert len(ended) > CLIENTS  # somebody came again while the replicas were replaced
    crashes = {request["id"]: launcher.crashes(request["id"]) for request in ended}
    assert set(crashes.values()) == {0}, (crashes, ended, launcher.logs())
    for name, old in before.items():
        new = launcher.replica(name)
        assert (new["state"], new["restarts"]) == ("ready", old["restarts"] + 1)
        assert new["pid"] != old["pid"]
        launcher.wait_for(f"{name} ended with code 0")


def test_stopping_loses_no_request_and_kills_nothing_whatever_connections_are_open(
    launcher: Launcher, tmp_path: Path
) -> None:
    """What two replicas had is done by the one of the next start."""
    running = [launcher.submit(LONG) for _ in range(2)]
    queued = [launcher.submit(SHORT) for _ in range(4)]
    wait_until(
        lambda: all(launcher.call(f"/v1/requests/{i}")["status"] == "running" for i in running),
        30,
        "both long requests to run",
    )
    with ExitStack() as open_now:

        def connected() -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection("127.0.0.1", launcher.port, timeout=30)
            return open_now.enter_context(closing(connection))

        # As a browser keeps them: one for the next call, one opened ahead, and a stream of events.
        kept = connected()
        kept.request("GET", "/health")
        kept.getresponse().read()
        connected().connect()
        stream = connected()
        stream.request("GET", f"/v1/requests/{running[0]}/events")
        events = stream.getresponse()
        assert events.readline()
        held = connected()
        held.request("GET", f"/v1/requests/{running[0]}", headers={"Prefer": "wait=60"})

        assert launcher.end(signal.SIGTERM, timeout_s=STOP_S) == 0

        assert json.load(held.getresponse())["id"] == running[0], "a held call is answered"
        events.read()
    assert launcher.left() == []
    assert "killed" not in launcher.console().partition("stopping")[2]

    stages = tmp_path / "one.yaml"
    stages.write_text(ONE_REPLICA)
    launcher.start("--stage-configs-path", str(stages))
    for identifier in (*queued, *running):
        assert launcher.ended(identifier)["status"] == "succeeded"
        # Handed back, not given up: no stop counts as a crash.
        assert launcher.crashes(identifier) == 0


def test_a_launcher_that_is_killed_leaves_no_process_and_a_deploy_file_goes_on_with_its_work(
    launcher: Launcher, tmp_path: Path
) -> None:
    waiting = launcher.submit(LONG)
    assert launcher.end(signal.SIGKILL, timeout_s=STOP_S) == -signal.SIGKILL
    wait_until(lambda: not launcher.left(), GONE_S, "its parts to be gone")

    stages = tmp_path / "deploy.yaml"
    stages.write_text(DEPLOY_FILE)
    launcher.start("./models/tiny", "--stage-configs-path", str(stages))
    said = launcher.console()
    assert "replica0 ready: tiny on cpu core 0" in said
    assert "replica1 ready: tiny on cpu core 1" in said, "the devices are a template"
    assert said.count("these keys have no effect here: pipeline, async_chunk, ") == 1
    assert launcher.ended(waiting)["status"] == "succeeded"
    assert launcher.run("a red circle")["progress"]["steps"] == 2


def test_ctrl_c_stops_it_as_well(launcher: Launcher) -> None:
    assert launcher.end(signal.SIGINT, timeout_s=STOP_S) == 0
    assert launcher.left() == []


def test_models_that_do_not_load_or_draw_are_told_on_the_console_and_by_the_api(
    another: Launcher, tmp_path: Path
) -> None:
    """Of one the weights are none; no multiple of eight is a size the other can draw."""
    broken = tmp_path / "broken"
    shutil.copytree(REPOSITORY / "models" / "tiny", broken)
    (broken / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"not weights")
    stages = tmp_path / "stages.yaml"
    stages.write_text(NEVER_READY.format(broken=broken))

    another.start("--stage-configs-path", str(stages))

    said = another.console()
    assert "api ready" in said
    assert "not ready: replica0, replica1" in said
    for name, reason in (("replica0", "broken"), ("replica1", "60")):
        # Each is started again and again, and fails each time.
        replica = wait_until(
            lambda n=name: (now := another.replica(n))["state"] == "failed" and now,  # type: ignore[misc]
            GONE_S,
            f"{name} to be failed",
        )
        assert reason in replica["error"]
        another.wait_for(f"{name} failed: {replica['error']}")
        log, line = another.folder / "run" / "logs" / f"{name}.log", f"{name}: {replica['error']}"
        wait_until(lambda f=log, t=line: f"Error: {t}" in f.read_text(), GONE_S, line)  # type: ignore[misc]
    another.wait_for("; starting again in 2 s", count=2)
    for path, body in (("/ready", None), ("/v1/requests", {"prompt": "a cat", "model": "broken"})):
        with pytest.raises(urllib.error.HTTPError) as refused:
            another.call(path, body)
        with refused.value as answer:
            assert answer.code == 503
            assert path == "/ready" or int(answer.headers["Retry-After"]) >= 1
    assert another.end(signal.SIGTERM, timeout_s=STOP_S) == 0
    assert another.left() == []


@pytest.mark.parametrize("variable", ["API_PORT", "FLOWER_PORT"])
def test_a_taken_port_is_refused(another: Launcher, variable: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        another.environ[variable] = str(port)
        refused = (
            another.refused("--port", str(port)) if variable == "API_PORT" else another.refused()
        )
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"port {port}" in refused.stderr
    assert variable in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert another.left() == []


def test_a_model_that_is_not_there_is_refused(another: Launcher) -> None:
    refused = another.refused("./no/such/model")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no/such/model does not exist" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert another.left() == []


def test_a_redis_that_does_not_answer_is_refused_without_its_password(another: Launcher) -> None:
    another.environ["REDIS_URL"] = f"redis://:secret@127.0.0.1:{free_port()}/0"
    refused = another.refused()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("Error: Redis at 127.0.0.1:")
    assert "secret" not in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert another.left() == []


def test_a_redis_that_is_silent_is_refused_soon(another: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        another.environ["REDIS_URL"] = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        refused = another.refused()
    assert refused.returncode == 1
    assert "does not answer" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_stage_file_that_is_wrong_is_refused(another: Launcher, tmp_path: Path) -> None:
    stages = tmp_path / "stages.yaml"
    stages.write_text(ONE_REPLICA.replace("num_replicas: 1", "num_replicas: 2"))
    refused = another.refused("--stage-configs-path", str(stages))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "stages[0].runtime" in refused.stderr
    assert another.left() == []
