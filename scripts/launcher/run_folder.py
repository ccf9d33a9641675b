"""The run folder: what a running service keeps on this host, and the lock that one launcher holds.

::

    .run/
      launcher.lock   held by the launcher that runs; its process id
      stages.yaml     the stage file in force: the one given, with MODEL and absolute paths put in
      logs/           one log for each part; that of the start before as .log.1
      redis/          the append-only file, which is every request, if Redis is ours
      outputs/        the pictures, unless OUTPUTS_URL says otherwise
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from configs.stage_config import StageConfig
from scripts.launcher.preflight import StartRefused


class RunFolder:
    """The folder, made where it is not there."""

    def __init__(self, path: Path) -> None:
        """Make the folder.

        Raises:
            StartRefused: It cannot be made.
        """
        self.path = path
        self.logs = path / "logs"
        self.redis = path / "redis"
        self._lock: int | None = None
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartRefused(f"{path} cannot be created: {error.strerror}; set RUN_DIR") from None

    def lock(self) -> None:
        """Hold the folder for as long as this process lives; the kernel lets go of it afterwards.

        Raises:
            StartRefused: Another launcher holds it.
        """
        path = self.path / "launcher.lock"
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text(encoding="ascii").strip()
            raise StartRefused(
                f"another launcher (pid {holder or 'unknown'}) runs from {self.path}; stop it, or "
                "set RUN_DIR to another folder"
            ) from None
        except OSError as error:
            raise StartRefused(f"{path} cannot be locked: {error.strerror}; set RUN_DIR") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def rotate_logs(self) -> None:
        """Keep the logs of the start before as ``.log.1``."""
        for log in self.logs.glob("*.log"):
            log.replace(log.with_suffix(".log.1"))

    def write_stages(
        self, document: Mapping[Any, Any], stages: Sequence[StageConfig], source: str
    ) -> Path:
        """Write the stage file in force and return its path.

        The parts read this one, so that they see the model that was given beside the file, and
        folders that were relative to where the launcher was started.

        Args:
            document: The stage file in the reference's dialect; already checked. It is changed.
            stages: What was read from it, its models located.
            source: Where it is from, for its reader.
        """
        for entry, stage in zip(document["stages"], stages, strict=True):
            first, *others = stage.model_names
            names = [first, *others] if others else first
            named = {"model": stage.engine_args.model, "served_model_name": names}
            entry["engine_args"] = {**(entry.get("engine_args") or {}), **named}
            entry["default_sampling_params"] = dict(stage.default_sampling_params)
        path = self.path / "stages.yaml"
        heading = f"# Written at each start from {source}\n"
        path.write_text(heading + yaml.safe_dump(dict(document), sort_keys=False), encoding="utf-8")
        return path
