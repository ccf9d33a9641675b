"""What commands say to people: a line for each thing that happens, and errors."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO


def say(line: str) -> None:
    """Print a line at once, also where the output is a file or a pipe."""
    _write(sys.stdout, line)


def complain(line: str) -> None:
    """Print an error; one line, unless the configuration has several things to mend."""
    _write(sys.stderr, f"Error: {line}")


def _write(stream: TextIO, line: str) -> None:
    # Where the terminal is gone the service goes on, and its logs say the same.
    with suppress(OSError):
        print(line, file=stream, flush=True)
