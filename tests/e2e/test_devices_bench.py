"""The bench of several devices: one command, every way a denoiser has, nothing left behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import psutil
import pytest

from scripts.lab.devices_bench import main

pytestmark = pytest.mark.slow

OPTIONS = ("--device", "cpu", "--size", "tiny")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The command, in this process, which has torch already."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["devices_bench", *OPTIONS, *arguments])
        main()

    return run


@pytest.mark.parametrize(
    ("denoiser", "asked", "measured"),
    [
        # Diffusers has no plan for sharing the sequence of a UNet; groups of one rank need none.
        ("UNet", ("ranks", "groups"), {"groups"}),
        # Ranks that share a sequence are started as groups are.
        ("DiT", ("copies",), {"copies"}),
    ],
)
def test_all_ways_that_a_denoiser_has_are_measured_and_no_rank_is_left(
    bench: Callable[..., None],
    denoiser: str,
    asked: tuple[str, ...],
    measured: set[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench("--rows", "2", "--repeats", "1", "--denoisers", denoiser, "--ways", *asked)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["denoiser"], set(row["speedup"])) for row in rows] == [(denoiser, measured)]
    started = [" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]
    assert [each for each in started if "devices.rank" in each or "spawn_main" in each] == []


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--devices", "3"), "--devices 3 makes no two groups; give an even number"),
        (("--denoisers", "SDXL"), "--size tiny has no SDXL; give one of UNet, DiT"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    bench: Callable[..., None],
    arguments: tuple[str, ...],
    fault: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(*arguments)
    assert ended.value.code == 2
    assert fault in capsys.readouterr().err
