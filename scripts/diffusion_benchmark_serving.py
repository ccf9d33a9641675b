"""Benchmark of a running service: ``python -m scripts.diffusion_benchmark_serving``.

Accepts the flags of vLLM-Omni's client of the same name and writes its JSON fields, with figures of
each replica beside them; ``python scripts/diffusion_benchmark_serving.py`` does the same.

Exit codes: 0, every request succeeded; 1, some failed, or the benchmark could not start; 2, the
command line is wrong; 130, interrupted.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.errors import ConfigurationError
from configs.settings import load_settings
from scripts.api_client import complain, say
from scripts.serving_bench.figures import figures
from scripts.serving_bench.measurement import Measurement, measure
from scripts.serving_bench.options import Options, read_options
from scripts.serving_bench.report import table, write_report
from scripts.serving_bench.requests import BenchRefused


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit code."""
    try:
        options = read_options(arguments, load_settings().api_key)
        return _run(options, shlex.join(sys.argv if arguments is None else arguments))
    except ConfigurationError as refused:
        complain(str(refused))
        return 2
    except BenchRefused as refused:
        complain(str(refused))
        return 1
    except KeyboardInterrupt:
        complain("interrupted; requests in flight are canceled")
        return 130


def _run(options: Options, command: str) -> int:
    for path in (options.output_file, options.report):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchRefused(f"{path}: its folder does not exist; create it first")
    document = figures(asyncio.run(_measured(options)), options)
    say(table(document))
    try:
        if options.output_file is not None:
            options.output_file.write_text(json.dumps(document, indent=1), encoding="utf-8")
            say(f"Figures written to {options.output_file}")
        if options.report is not None:
            write_report(document, options.report, command)
            say(f"Report written to {options.report}")
    except OSError as error:
        raise BenchRefused(f"the results cannot be written: {error}") from None
    return 1 if document["failed_requests"] else 0


async def _measured(options: Options) -> Measurement:
    """Measure, and give up on a signal so that the service cancels what is in flight."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await measure(options, say)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


if __name__ == "__main__":
    sys.exit(main())
