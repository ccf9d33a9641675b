"""Replicas of one host load at the same time as long as its memory suffices for all of them.

Each writes down what its weights will take of the host's memory. One for which too little would be
left waits until one of the others has loaded. What says that another still loads is a lock that the
kernel takes back when its process ends, however that ends.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR
from tempfile import NamedTemporaryFile, gettempdir
from typing import IO, Final, cast

_logger = logging.getLogger(__name__)
_GATE: Final = "gate"


@contextmanager
def turn_to_load(
    needed: int,
    free: Callable[[], int],
    waiting: Callable[[], None] = lambda: None,
    loading: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> Iterator[None]:
    """Wait until `needed` bytes are left beside what others of this user load, then load.

    Where nobody else loads it is one's turn, however little is left. `free` returns the bytes that
    are free now; `waiting` is called once if there is a wait, and `loading` when it is over.
    """
    folder = folder or Path(gettempdir()) / f"diffusion-replicas-loading-{os.getuid()}"
    if not _can_be_written(folder):
        yield
        return
    told = False
    while True:
        with (folder / _GATE).open("a") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            others = _others(folder)
            taken = sum(size for _, size in others)
            if not others or free() - taken >= needed:
                own = _enter(folder, needed)
                for other, _ in others:
                    other.close()
                break
        if not told:
            _logger.info("waiting for memory until another replica of this host has loaded")
            waiting()
            told = True
        _await_one(others)
    if told:
        loading()
    try:
        yield
    finally:
        with (folder / _GATE).open("a") as gate:  # nobody looks at the files meanwhile
            fcntl.flock(gate, fcntl.LOCK_EX)
            own.close()


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        made = folder.lstat()
        if not S_ISDIR(made.st_mode) or made.st_uid != os.getuid():  # anybody may write beside it
            raise NotADirectoryError(f"it is not a folder of user {os.getuid()}")
        (folder / _GATE).touch()
    except OSError as error:
        _logger.warning("%s: replicas do not take turns to load: %s", folder, error)
        return False
    return True


def _enter(folder: Path, needed: int) -> IO[str]:
    """Write down what this process will take; the lock is held as long as the file is there."""
    own = NamedTemporaryFile("w", dir=folder, prefix=f"{os.getpid()}-")  # noqa: SIM115 - held
    fcntl.flock(own, fcntl.LOCK_EX)
    own.write(str(needed))
    own.flush()
    return cast("IO[str]", own)


def _others(folder: Path) -> list[tuple[IO[str], int]]:
    """Those who load now, each with the bytes that it will take; called while holding the gate."""
    found: list[tuple[IO[str], int]] = []
    for file in folder.iterdir():
        if file.name == _GATE:
            continue
        opened = file.open()
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append((opened, int(opened.read() or 0)))
        else:  # its process has ended without a word
            file.unlink(missing_ok=True)
            opened.close()
    return found


def _await_one(others: list[tuple[IO[str], int]]) -> None:
    """Wait until the first of them has loaded, or has ended."""
    fcntl.flock(others[0][0], fcntl.LOCK_SH)
    for opened, _ in others:
        opened.close()
