"""Restarts all replicas one by one under load: ``python -m scripts.rolling_restart``.

Each leaves the rotation, ends or hands back what it runs, ends its process, and is started again by
whoever supervises it; the next one follows when it is ready. Needs the API and nothing else: no
Redis, no signals, no shell on the hosts of the replicas.

Exit codes: 0, all are new; 1, it stopped half-way, the others go on serving; 2, nothing was done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from configs.errors import ConfigurationError
from configs.settings import load_settings
from scripts.console import complain, say
from scripts.door import Door, NoAnswer, Refused
from scripts.launcher.parts import base_url, reachable
from scripts.roll import RollingRestart, Stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Restart the replicas; return the exit code."""
    try:
        options = _parser().parse_args(arguments)
    except ConfigurationError as refused:
        complain(str(refused))
        return 2
    door = Door(options.url.rstrip("/"), options.api_key)
    rolling = RollingRestart(door, options.drain_s, options.timeout, say)
    try:
        chosen = rolling.choose(options.names, force=options.force)
    except (Stopped, NoAnswer, Refused) as error:
        complain(str(error))
        return 2
    try:
        rolling.roll(chosen, force=options.force)
    except (Stopped, Refused) as error:
        complain(f"{error}. The roll stops here; the other replicas serve as before.")
        return 1
    return 0


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to 86400 seconds")
    return seconds


def _parser() -> argparse.ArgumentParser:
    settings = load_settings()
    url = base_url(reachable(settings.api_host), settings.api_port)
    parser = argparse.ArgumentParser(
        prog="python -m scripts.rolling_restart",
        description="Restart replicas one by one, without a failed request.",
    )
    parser.add_argument("names", metavar="REPLICA", nargs="*", help="which ones (default: all)")
    parser.add_argument("--url", default=url, help=f"of the API (default: {url})")
    parser.add_argument(
        "--api-key", default=settings.api_key, help="key of the API (default: API_KEY)"
    )
    parser.add_argument(
        "--drain-s",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a running request may go on before it begins anew elsewhere (default: 600)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=900.0,
        metavar="SECONDS",
        help="how long a replica may take to be ready again (default: 900)",
    )
    parser.add_argument(
        "--force", action="store_true", help="also restart the only ready replica of a stage"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
