"""What only a GPU can show, in one table: ``python -m scripts.lab.gpu_checks``.

Each group of checks is a process of its own with a share of the time; what one leaves is for those
after it, and what fails, hangs or dies ends none but itself. The table comes out line by line, in
Markdown. Without a GPU all runs as far as a CPU can.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Final

from configs.settings import REPOSITORY

OK: Final = "ok"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"


@dataclass(frozen=True)
class Row:
    """One line of the table; `status` is ok, failed or skipped."""

    check: str
    status: str
    figure: str = ""
    reason: str = ""

    def line(self, seconds: float) -> str:
        """Return it as Markdown, with the seconds of its group."""
        cells = (self.check, self.status, self.figure, self.reason, f"{seconds:.0f} s")
        return "| " + " | ".join(each.replace("|", "/") for each in cells) + " |"


@dataclass(frozen=True)
class Ended:
    """What became of a process: its exit code, None after its time, and what it wrote."""

    code: int | None
    out: str
    err: str

    @property
    def why(self) -> str:
        """One line for what went wrong."""
        if self.code is None:
            return "its share of the time is over"
        lines = [each for each in (self.err or self.out).strip().splitlines() if each.strip()]
        return f"exit code {self.code}: {lines[-1].strip()[:200] if lines else 'it said nothing'}"


@dataclass(frozen=True)
class Group:
    """Checks that one process makes.

    Attributes:
        name: Names the rows for which it says nothing.
        share: Of the time, in parts of the shares of all that are still to run.
        command: What runs.
        rows: Reads the rows from what it wrote; raises ValueError or the like where it cannot.
    """

    name: str
    share: float
    command: Sequence[str]
    rows: Callable[[Ended], list[Row]]


def run(command: Sequence[str], limit_s: float) -> Ended:
    """Run a command, and end it and all that it started after so many seconds."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, cwd=REPOSITORY, start_new_session=True
        )
        code: int | None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read())


def run_groups(
    groups: Sequence[Group], budget_s: float, tell: Callable[[Row, float], None]
) -> list[Row]:
    """Run the groups in turn within the budget; `tell` gets each row and its group's seconds."""
    found: list[Row] = []
    ends = time.monotonic() + budget_s
    for index, group in enumerate(groups):
        shares = sum(each.share for each in groups[index:])
        began = time.monotonic()
        ended = run(group.command, max((ends - began) * group.share / shares, 1.0))
        try:
            rows = group.rows(ended)
        except (ValueError, LookupError, TypeError):
            rows = []
        if (ended.code != 0 or not rows) and not any(row.status == SKIPPED for row in rows):
            rows.append(Row(group.name, FAILED, reason=ended.why))
        for row in rows:
            tell(row, time.monotonic() - began)
        found += rows
    return found


def told_rows(ended: Ended) -> list[Row]:
    """Read the rows that a process wrote, one JSON document a line."""
    lines = [line for line in ended.out.splitlines() if line.startswith('{"check"')]
    return [Row(**json.loads(line)) for line in lines]


def pytest_rows(ended: Ended) -> list[Row]:
    """Read pytest's last line."""
    said = ended.out.strip().splitlines()[-1].strip("= ")
    if ended.code == 0 and "passed" not in said:
        return [Row("tests marked gpu", SKIPPED, said, "no test ran")]
    return [Row("tests marked gpu", OK, said)] if ended.code == 0 else []


def engine_rows(ended: Ended) -> list[Row]:
    """Read the last line of ``engine_bench``."""
    rows = json.loads(ended.out.strip().splitlines()[-1])["rows"]
    return [
        Row(
            f"engine_bench {row['model']}, {row['n']} at once",
            OK,
            f"serial {row['seconds']['serial']} s,"
            f" together : static {row['to_static']['together'][0]}",
        )
        for row in rows
    ]


def devices_rows(ended: Ended) -> list[Row]:
    """Read the last line of ``devices_bench``."""
    if "CUDA devices here" in ended.err:  # which needs two
        return [Row("devices_bench", SKIPPED, reason=ended.err.strip().splitlines()[-1])]
    rows = json.loads(ended.out.strip().splitlines()[-1])["rows"]
    return [
        Row(
            f"devices_bench {row['denoiser']}, {row['rows']} rows",
            OK,
            f"one {row['one_ms']} ms; "
            + ", ".join(f"{way} x{each[0]}" for way, each in row["speedup"].items()),
        )
        for row in rows
    ]


def groups_for(kind: str) -> list[Group]:
    """Return what to run on `cuda` or `cpu`."""
    here = [sys.executable, "-m"]
    marked = [
        str(each.relative_to(REPOSITORY))
        for each in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        if "mark.gpu" in each.read_text()
    ]
    cuda = kind == "cuda"
    engine = ["--models", "sd3", "--at", "1", "4"] if cuda else ["--models", "tiny", "--at", "2"]
    devices = (
        ["--denoisers", "FLUX.1", "--rows", "2"]
        if cuda
        else ["--size", "tiny", "--denoisers", "DiT", "--rows", "2"]
    )
    ways = ["--ways", "copies", "ranks", "--repeats", "3"]
    lab = "scripts.lab"
    tests = [*here, "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *marked]
    measured = [
        Group(name, share, [*here, f"{lab}.gpu_checks.measured", name], told_rows)
        for name, share in (
            ("attention", 45),
            ("compile", 50),
            ("offload", 60),
            ("quantization", 70),
            ("requests", 50),
        )
    ]
    return [
        Group("tests marked gpu", 80, tests, pytest_rows),
        Group(
            "engine_bench",
            80,
            [*here, f"{lab}.engine_bench", *engine, "--repeats", "1"],
            engine_rows,
        ),
        *measured,
        Group("devices_bench", 60, [*here, f"{lab}.devices_bench", *devices, *ways], devices_rows),
    ]


def main() -> None:
    """Run all and print the table; the exit code is 1 where a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all")
    budget = parser.parse_args().budget
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is ended

    def tell(row: Row, seconds: float) -> None:
        print(row.line(seconds), flush=True)

    print(
        "| check | status | figure | reason | its group took |\n|---|---|---|---|---|", flush=True
    )
    about = [sys.executable, "-m", "scripts.lab.gpu_checks.measured", "device"]
    found = run_groups([Group("device", 1, about, told_rows)], min(budget, 60), tell)
    kind = "cuda" if "cuda" in found[0].figure else "cpu"
    found += run_groups(groups_for(kind), budget - (time.monotonic() - began), tell)
    counts = {each: sum(row.status == each for row in found) for each in (OK, FAILED, SKIPPED)}
    took = time.monotonic() - began
    print(f"\n{', '.join(f'{n} {each}' for each, n in counts.items())}; {took:.0f} s on {kind}")
    sys.exit(1 if counts[FAILED] else 0)


if __name__ == "__main__":
    main()
