"""The bench of several devices: one command, every way a denoiser has, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from configs.settings import REPOSITORY
from scripts.lab.devices_bench import main

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-m", "scripts.lab.devices_bench", "--device", "cpu", "--size", "tiny")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*COMMAND, *arguments),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_all_ways_are_measured_and_no_rank_is_left() -> None:
    # It returns once nobody holds its output any more: no rank has outlived it.
    done = run("--rows", "2", "--repeats", "1", "--ways", "copies", "ranks", "groups")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    # Diffusers has no plan for sharing the sequence of a UNet; groups of one rank need none.
    ways = {row["denoiser"]: set(row["speedup"]) for row in rows}
    assert ways == {"UNet": {"copies", "groups"}, "DiT": {"copies", "ranks", "groups"}}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--devices", "3"), "--devices 3 makes no two groups; give an even number"),
        (("--denoisers", "SDXL"), "--size tiny has no SDXL; give one of UNet, DiT"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: tuple[str, ...],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["devices_bench", *COMMAND[3:], *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert fault in capsys.readouterr().err
