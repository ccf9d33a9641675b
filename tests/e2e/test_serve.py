"""One command: what the launcher starts, says, refuses, restarts, and leaves behind: nothing."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from standardwebhooks import Webhook

from configs.settings import REPOSITORY
from tests.e2e.launcher import Launcher
from tests.integration.receiver import receiving
from tests.redis_server import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

STOP_S = 10.0
GONE_S = 10.0
PARTS = ("redis", "replica0", "replica1", "api", "webhooks", "flower")
SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"
LONG, SHORT = 1000, 20
ONE_REPLICA = """
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime: {devices: "0", num_replicas: 1}
    engine_args: {model: "./models/tiny", device: cpu}
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
        DRAIN_S="1",
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


def test_a_killed_replica_comes_back(launcher: Launcher) -> None:
    before = launcher.replica("replica1")
    os.kill(before["pid"], signal.SIGKILL)
    launcher.wait_for("replica1 ended with signal 9 (killed); starting again in ")
    launcher.wait_for("replica1 ready: ", count=2)
    after = launcher.replica("replica1")
    assert after["state"] == "ready"
    assert after["pid"] != before["pid"]


def test_a_killed_redis_comes_back_with_its_data(launcher: Launcher) -> None:
    done = launcher.run("a red heart on a pink background")
    (redis,) = [p for p in launcher.started() if "redis" in p.name()]
    redis.kill()
    launcher.wait_for("redis ready: ", count=2)
    assert launcher.call(f"/v1/requests/{done['id']}")["status"] == "succeeded"
    answer = launcher.run("a red heart on a pink background")
    assert answer["status"] == "succeeded"


def test_stopping_loses_no_request_and_leaves_no_process(launcher: Launcher) -> None:
    running = [launcher.submit(LONG) for _ in range(2)]
    queued = [launcher.submit(SHORT) for _ in range(4)]
    wait_until(
        lambda: all(launcher.call(f"/v1/requests/{i}")["status"] == "running" for i in running),
        30,
        "both long requests to run",
    )
    assert launcher.end(signal.SIGTERM, timeout_s=STOP_S) == 0
    assert launcher.left() == []
    assert "killed" not in launcher.console().partition("stopping")[2]

    launcher.start()
    for identifier in (*queued, *running):
        assert launcher.ended(identifier)["status"] == "succeeded"
        # Handed back, not given up: no stop counts as a crash.
        assert launcher.crashes(identifier) == 0


def test_stopping_kills_nothing_whatever_connections_are_open(
    launcher: Launcher,
) -> None:
    request = launcher.submit(LONG)
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
        stream.request("GET", f"/v1/requests/{request}/events")
        events = stream.getresponse()
        assert events.readline()
        held = connected()
        held.request("GET", f"/v1/requests/{request}", headers={"Prefer": "wait=60"})

        assert launcher.end(signal.SIGTERM, timeout_s=STOP_S) == 0

        assert json.load(held.getresponse())["id"] == request, "a held call is answered"
        events.read()
    assert "killed" not in launcher.console()
    assert launcher.left() == []

    launcher.start()
    launcher.call(f"/v1/requests/{request}/cancel", {})


def test_ctrl_c_stops_it_as_well(launcher: Launcher) -> None:
    assert launcher.end(signal.SIGINT, timeout_s=STOP_S) == 0
    assert launcher.left() == []
    launcher.start()


def test_a_launcher_that_is_killed_leaves_no_process(launcher: Launcher) -> None:
    waiting = launcher.submit(LONG)
    assert launcher.end(signal.SIGKILL, timeout_s=STOP_S) == -signal.SIGKILL
    wait_until(lambda: not launcher.left(), GONE_S, "its parts to be gone")

    launcher.start()
    assert launcher.ended(waiting)["status"] == "succeeded"


def test_a_deploy_file_of_vllm_omni_is_served(another: Launcher, tmp_path: Path) -> None:
    stages = tmp_path / "deploy.yaml"
    stages.write_text(DEPLOY_FILE)
    another.start("./models/tiny", "--stage-configs-path", str(stages))
    said = another.console()
    assert "replica0 ready: tiny on cpu core 0" in said
    assert "replica1 ready: tiny on cpu core 1" in said, "the devices are a template"
    assert said.count("these keys have no effect here: pipeline, async_chunk, ") == 1
    assert another.run("a red circle")["progress"]["steps"] == 2
    assert another.end(signal.SIGTERM, STOP_S) == 0


def test_a_model_that_does_not_load_is_told_on_the_console_and_by_the_api(
    another: Launcher, tmp_path: Path
) -> None:
    model = tmp_path / "broken"
    shutil.copytree(REPOSITORY / "models" / "tiny", model)
    (model / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"not weights")
    stages = tmp_path / "stages.yaml"
    stages.write_text(ONE_REPLICA)

    another.start(str(model), "--stage-configs-path", str(stages))

    (line,) = [line for line in another.console().splitlines() if "replica0 failed: " in line][:1]
    assert "api ready" in another.console()
    assert "not ready: replica0" in another.console()
    replica = another.replica("replica0")
    assert replica["state"] == "failed"
    assert replica["error"] in line
    another.wait_for("starting again in 2 s")
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
