"""What the launcher says to people: a line for each thing that happens, and where to go from there.

Does not know processes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from configs.stages import ReplicaPlan


def say(line: str) -> None:
    """Print a line at once, also where the output is a file or a pipe."""
    _write(sys.stdout, line)


def complain(line: str) -> None:
    """Print an error; one line, unless the configuration has several things to mend."""
    _write(sys.stderr, f"Error: {line}")


def addresses(
    api: str,
    flower: str,
    logs: Path,
    plans: Sequence[ReplicaPlan],
    failed: Sequence[str],
    *,
    asks_for_key: bool,
) -> str:
    """Return the block that ends the start: what is served and where, and a call to try.

    Args:
        api: URL of the API.
        flower: URL of Flower.
        logs: Folder of the parts' logs.
        plans: The replicas.
        failed: Names of the parts that are not ready.
        asks_for_key: Whether calls must bring the key.
    """
    models = ", ".join(dict.fromkeys(plan.stage.model_name for plan in plans))
    count = f"{len(plans)} replica{'' if len(plans) == 1 else 's'}"
    state = f", not ready: {', '.join(failed)}" if failed else ""
    key = ' -H "Authorization: Bearer $API_KEY"' if asks_for_key else ""
    return f"""
Diffusion Replicas: {models} on {count}{state}
  page    {api}/
  API     {api}/v1/requests
  docs    {api}/docs
  Flower  {flower}/
  logs    {logs}

Try it:
  curl -s {api}/v1/requests{key} -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\
    -d '{{"prompt": "a large red circle on a blue background"}}'

Ctrl-C stops everything."""


def _write(stream: TextIO, line: str) -> None:
    # Where the terminal is gone the service goes on, and its logs say the same.
    with suppress(OSError):
        print(line, file=stream, flush=True)
