"""The output store: files of requests under one fsspec URL."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import re
import time
from collections.abc import Callable
from typing import Any, Final

import fsspec
from redis import Redis

from configs.errors import OutputWriteFailed
from configs.settings import Settings
from routing.keys import Keys

_OUTPUT: Final = re.compile(r"\.?(\d+)-\d+\.")  # {attempt}-{number}.png, and while it is written
_logger = logging.getLogger(__name__)


class OutputStore:
    """Writes, reads and removes files by name."""

    def __init__(
        self,
        url: str,
        tries: int = 4,
        pause_s: float = 0.25,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Try a write ``tries`` times, with a pause that doubles from ``pause_s`` on.

        Raises:
            ValueError: No file system is known for the URL's scheme.
            ImportError: Its package is not installed (s3:// needs s3fs).
        """
        filesystem, root = fsspec.core.url_to_fs(url)
        self._fs: Any = filesystem
        self._root: str = root
        self._tries = tries
        self._pause_s = pause_s
        self._sleep = sleep

    def write(self, name: str, data: bytes) -> None:
        """Store ``data`` under ``name``.

        Raises:
            OutputWriteFailed: It could not be written, however often it was tried.
        """
        for attempt in range(self._tries):
            try:
                self._write_once(name, data)
            except Exception as error:
                if attempt == self._tries - 1:
                    raise OutputWriteFailed(
                        f"The output could not be stored after {self._tries} tries: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                pause_s = self._pause_s * 2**attempt
                _logger.warning(
                    "%s was not stored, trying again in %g s: %s: %s",
                    name, pause_s, type(error).__name__, error,
                )  # fmt: skip
                self._sleep(pause_s)
            else:
                return

    def read(self, name: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            FileNotFoundError: There is none of that name.
        """
        data: bytes = self._fs.cat_file(self._path(name))
        return data

    def remove_file(self, name: str) -> None:
        """Remove one file, if it is there."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def remove(self, request_id: str) -> None:
        """Remove all files of a request, if there are any."""
        try:
            self._fs.rm(self._path(request_id), recursive=True)
        except FileNotFoundError:
            return

    def remove_attempts_before(self, request_id: str, attempt: int) -> None:
        """Remove the outputs of a request's earlier attempts, whole ones and others."""
        for base in self._bases(request_id):
            output = _OUTPUT.match(base)
            if output is not None and int(output[1]) < attempt:
                self.remove_file(f"{request_id}/{base}")

    def names(self, request_id: str) -> list[str]:
        """Return the names of a request's files, whole ones only."""
        return [f"{request_id}/{base}" for base in self._bases(request_id) if base[0] != "."]

    def _bases(self, request_id: str) -> list[str]:
        folder = self._path(request_id)
        self._fs.invalidate_cache(folder)
        try:
            found: list[str] = self._fs.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(path) for path in found)

    def _write_once(self, name: str, data: bytes) -> None:
        path = self._path(name)
        folder, base = posixpath.split(path)
        temporary = posixpath.join(folder, f".{base}.part")
        self._fs.makedirs(folder, exist_ok=True)
        try:
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, path)
        except BaseException:
            # What went wrong first is told. Where renaming is copying, both names may be there.
            for left in (temporary, path):
                with contextlib.suppress(Exception):
                    self._fs.rm_file(left)
            raise

    def _path(self, name: str) -> str:
        if not name or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{name!r} is no name of an output")
        return posixpath.join(self._root, name)


# Longer than any submit takes, and than a replica needs to let go of a request that was removed.
ORPHAN_AFTER_S: Final = 3600.0


class OrphanedOutputs:
    """Ids of requests whose files may have no record, each with the moment it was noted."""

    def __init__(
        self, settings: Settings, redis: Redis, clock: Callable[[], float] = time.time
    ) -> None:
        self._redis = redis
        self._key = Keys(settings.redis_prefix).orphaned()
        self._clock = clock

    def note(self, request_id: str) -> None:
        """Note an id; the scripts strike it out when it is recorded, and note what they remove.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        self._redis.zadd(self._key, {request_id: self._clock()})

    def strike(self, request_id: str) -> None:
        """Strike an id out: it has no files, or a record.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        self._redis.zrem(self._key, request_id)

    def old(self, limit: int = 100) -> list[str]:
        """Return up to `limit` ids that were noted an hour ago or more, the oldest first.

        Raises:
            redis.RedisError: Redis did not answer.
        """
        ids: list[str] = self._redis.zrangebyscore(
            self._key, "-inf", self._clock() - ORPHAN_AFTER_S, start=0, num=limit
        )  # type: ignore[assignment]
        return ids
