"""The plan of a sweep: for each replica count the stage file that has it, all else being equal.

Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.devices import check_machine, detect_machine
from configs.stages import StageConfig, load_stages, reference_document
from scripts.launcher.refusal import StartRefused


@dataclass(frozen=True)
class SweepPlan:
    """One stage and the devices that its replicas may have, in the order they are dealt out.

    Attributes:
        source: The stage file as it was given.
        stage: What it says of the stage that is swept.
        entry: The same, as it stands in the file.
        devices: All devices there are for it.
    """

    source: Path
    stage: StageConfig
    entry: Mapping[str, Any]
    devices: tuple[int, ...]

    def write(self, replicas: int, folder: Path) -> Path:
        """Write the stage file of so many replicas into the folder; returns its path."""
        entry = deepcopy(dict(self.entry))
        used = self.devices[: replicas * self.stage.devices_per_replica]
        entry["runtime"] = {
            **(entry.get("runtime") or {}),
            "num_replicas": replicas,
            "devices": ",".join(str(device) for device in used),
        }
        entry["engine_args"] = {**entry["engine_args"], "model": self.stage.engine_args.model}
        entry["engine_args"].setdefault("served_model_name", self.stage.model_name)
        path = folder / f"stages_{replicas}.yaml"
        path.write_text(yaml.safe_dump({"stages": [entry]}, sort_keys=False), encoding="utf-8")
        return path


def plan_sweep(
    path: Path,
    counts: Sequence[int],
    environ: Mapping[str, str],
    *,
    stage_id: int | None = None,
    model: str | None = None,
) -> SweepPlan:
    """Read the stage file and see that there are devices for every count.

    Args:
        path: The stage file.
        counts: Replica counts.
        environ: Where CUDA_VISIBLE_DEVICES may narrow the devices.
        stage_id: Which stage to sweep; needed where there are several.
        model: Folder or hub id in place of the one in the file.

    Raises:
        ConfigurationError: The file is refused, or this machine does not have its devices.
        StartRefused: There are fewer devices than the largest count needs.
    """
    stages = load_stages(path, model)
    entries = reference_document(path, model)["stages"]
    index = _picked(stages, stage_id, path)
    stage, entry = stages[index], entries[index]
    machine = detect_machine(environ)
    check_machine([stage], machine)
    named = (entry.get("runtime") or {}).get("devices") is not None
    there = machine.count_of(machine.kind_for(stage))
    devices = stage.runtime.devices if named else tuple(range(there))
    each, most = stage.devices_per_replica, max(counts)
    if most * each > len(devices):
        raise StartRefused(_too_few(most, each, devices, path if named else None))
    return SweepPlan(path, stage, entry, devices)


def _picked(stages: Sequence[StageConfig], stage_id: int | None, path: Path) -> int:
    ids = [stage.stage_id for stage in stages]
    if stage_id is None and len(ids) == 1:
        return 0
    if stage_id in ids:
        return ids.index(stage_id)
    known = ", ".join(str(known) for known in ids)
    raise StartRefused(f"{path} has the stages {known}; say by --stage-id which one is to be swept")


def _too_few(most: int, each: int, devices: tuple[int, ...], path: Path | None) -> str:
    """The refusal; `path` is the file that names the devices, if one does."""
    needed = f"{most} replicas need {most * each} devices ({each} each)"
    numbers = ",".join(str(device) for device in devices)
    have = f"runtime.devices of {path} names" if path else "this machine has"
    fit = len(devices) // each
    mend = f"give --replicas up to {fit}" if fit else "use a machine with more devices"
    where = ", or name more devices there" if path else ""
    return f"{needed}, and {have} {len(devices)} ({numbers}); {mend}{where}"
