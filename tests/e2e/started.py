"""Processes that a service has started, found by what they have open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def started_in(folder: Path) -> Iterator[psutil.Process]:
    """Living processes that have a file in the folder open, as all parts of a service do.

    Their environment would not do: some overwrite it to show a title.
    """
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(
                file.path.startswith(str(folder)) for file in process.open_files()
            ):
                yield process
        except psutil.Error:
            continue
