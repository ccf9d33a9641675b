"""Does another replica help? ``python -m scripts.sweep --replicas 1,2,4``.

For each count the service is started anew with so many replicas of the same stage, and the same
prompts with the same seeds are sent to it (it accepts the flags of
`scripts/diffusion_benchmark_serving.py` too). Writes `sweep.json` and `sweep.png`, and prints
throughput, latency and scaling efficiency. Ctrl-C leaves nothing running.

Exit codes: 0, every request succeeded; 1, some failed, or a service did not start; 2, the command
line or the configuration is wrong; 130, interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from configs.errors import ConfigurationError
from configs.settings import load_settings
from scripts.api_client import complain, say
from scripts.launcher.preflight import StartRefused
from scripts.serving_bench.figures import figures
from scripts.serving_bench.measured_service import running_service
from scripts.serving_bench.measurement import measure
from scripts.serving_bench.options import Options, read_options
from scripts.serving_bench.requests import BenchRefused
from scripts.serving_bench.scaling import SweepPlan, draw, plan_sweep, scaling, scaling_table

_PROMPTS_PER_REPLICA: Final = 12
_OURS: Final = ("--base-url", "--host", "--port", "--output-file", "--report", "--save-dir")


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, print and write; return the exit code."""
    try:
        with _terminable():
            return _sweep(*_read(arguments))
    except ConfigurationError as refused:
        complain(str(refused))
        return 2
    except (StartRefused, BenchRefused) as refused:
        complain(str(refused))
        return 1
    except KeyboardInterrupt:
        complain("interrupted; the service is stopped")
        return 130


def _sweep(chosen: argparse.Namespace, options: Options) -> int:
    plan = plan_sweep(
        chosen.stage_configs_path,
        chosen.replicas,
        os.environ,
        stage_id=chosen.stage_id,
        model=chosen.served,
    )
    folder: Path = chosen.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    started_at, load = datetime.now(UTC), os.getloadavg()[0]
    runs = []
    with TemporaryDirectory(prefix="diffusion-sweep-") as name:
        # Count after count in each round, so that what else the machine does falls on all alike.
        for number in range(1, chosen.repeats + 1):
            for count in chosen.replicas:
                say(f"round {number} of {chosen.repeats}, replicas: {count}")
                found = _run(plan, count, Path(name), chosen.start_timeout, options)
                runs.append({"replicas": count, "round": number, "figures": found})
                say(_line(found))
    rows = scaling(runs)
    document = {
        "stage_file": plan.source.name,
        "model": plan.stage.model_name,
        "started_at": started_at.isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load_average": [load, os.getloadavg()[0]],
        "scaling": [asdict(row) for row in rows],
        "runs": runs,
    }
    (folder / "sweep.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    first = runs[0]["figures"]
    count = first["completed_requests"] + first["failed_requests"]
    title = f"{plan.stage.model_name}: {count} requests, {first['arrivals']}"
    draw(rows, title, folder / "sweep.png")
    say(scaling_table(rows))
    say(f"Written: {folder / 'sweep.json'}, {folder / 'sweep.png'}")
    return 1 if any(row.failed for row in rows) else 0


def _line(found: dict[str, Any]) -> str:
    return (
        f"  {found['throughput_qps']:.3f} requests/s, p50 {found['latency_p50']:.2f} s, "
        f"p99 {found['latency_p99']:.2f} s, {found['failed_requests']} failed"
    )


def _run(
    plan: SweepPlan, count: int, folder: Path, start_timeout_s: float, options: Options
) -> dict[str, Any]:
    stage_file = plan.write(count, folder)
    with running_service(stage_file, count, start_timeout_s, options.api_key) as url:
        own = replace(options, base_url=url, model=plan.stage.model_name)
        return figures(asyncio.run(measure(own, say)), own)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end this as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Options]:
    settings = load_settings()
    parser = _parser(settings.stage_configs_path)
    chosen, rest = parser.parse_known_args(arguments)
    for flag in _OURS:
        if any(word == flag or word.startswith(f"{flag}=") for word in rest):
            parser.error(f"{flag} is set by the sweep; leave it out")
    options = read_options(rest, settings.api_key)
    chosen.served = options.model
    if options.num_prompts is None and options.dataset != "trace":
        options = replace(options, num_prompts=_PROMPTS_PER_REPLICA * max(chosen.replicas))
    if options.seed is None:
        options = replace(options, seed=0)
    return chosen, options


def _parser(default_file: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sweep",
        description="Measure a service with several replica counts, each started anew.",
        epilog="Accepts the flags of python -m scripts.diffusion_benchmark_serving too, except "
        "those for the place of the service and of its figures.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--stage-configs-path", type=Path, default=default_file, metavar="FILE")
    add("--stage-id", type=int, help="which stage, where the file has several")
    add("--replicas", type=_counts, default=[1, 2], help="counts, such as 1,2,4 (default: 1,2)")
    add("--repeats", type=_count, default=1, help="rounds; figures are medians over them")
    add("--output-dir", type=Path, default=Path("sweep-results"), help="for sweep.json, sweep.png")
    add("--start-timeout", type=float, default=900.0, help="seconds a service may take to start")
    return parser


def _count(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _counts(text: str) -> list[int]:
    return sorted({_count(part) for part in text.split(",")})


if __name__ == "__main__":
    sys.exit(main())
