"""`python -m scripts.generate` against a running service."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from configs.settings import REPOSITORY
from scripts.lab.tiny_model.picture_check import check_picture
from tests.e2e.service import RUN_S, Service
from tests.waiting import wait_until


def command(service: Service, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "scripts.generate", "--url", service.url, *arguments]


def generate(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(service, *arguments),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def test_a_picture_is_written_with_a_bar_and_the_replica_said(
    service: Service, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "out.png"
    prompt = "a large red circle on a blue background"
    done = generate(service, prompt, "--steps", "20", "--seed", "3", "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert check_picture(Image.open(path), prompt).ok
    assert "20/20" in done.stderr
    assert "succeeded on replica" in done.stderr
    assert f"{path}  64x64, seed 3, " in done.stdout
    assert "tiny on replica" in done.stdout
    assert "denoise" in done.stdout


def test_several_outputs_get_numbers_and_the_suffix_says_the_format(
    service: Service, tmp_path: Path
) -> None:
    done = generate(service, "a red circle", "-n", "2", "--steps", "4", "-o", f"{tmp_path}/a.jpg")
    assert done.returncode == 0, done.stderr
    for k in (0, 1):
        with Image.open(tmp_path / f"a-{k}.jpg") as picture:
            assert picture.format == "JPEG"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("a red circle", "--steps", "0"), 1, "num_inference_steps"),
        (("a red circle", "-o", "picture.gif"), 2, "'.gif' is not a supported format; use .png"),
        (("a red circle", "--image", "nowhere.png"), 2, "nowhere.png"),
        (("a red circle", "--lora", "style:much"), 2, "'much' is not a number"),
        (("a red circle", "--url", "http://127.0.0.1:9"), 1, "does not answer"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    service: Service, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = generate(service, *arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_cancels_the_request(service: Service) -> None:
    running = subprocess.Popen(
        command(service, "a red circle", "--steps", "900", "--seed", "987654"),
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )

    def mine() -> str:
        found = service.call("GET", "/v1/requests?status=running").json["data"]
        return next((one["id"] for one in found if one["parameters"]["seed"] == 987654), "")

    request_id = wait_until(mine, RUN_S, "the request to run")
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=RUN_S)
    assert running.returncode == 130
    assert f"{request_id} is canceled" in said
    assert service.ended(request_id)["status"] == "canceled"
