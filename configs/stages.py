"""Loads a stage file and plans its replicas: which one has which name and which devices.

It knows the file and its rules. Which GPU or core stands behind a device number, and whether this
machine has it, is known to `configs/devices.py`; nothing here starts a process.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from marshmallow import ValidationError

from configs.errors import ConfigurationError
from configs.refusal import field_errors
from configs.stage_config import (
    EngineArgs,
    ParallelConfig,
    ReplicaPlan,
    RuntimeConfig,
    StageConfig,
)
from configs.stage_file import read_mapping
from configs.stage_schema import (
    EngineArgsSchema,
    RuntimeSchema,
    StageFileSchema,
    StageSchema,
)

__all__ = [
    "EngineArgs",
    "ParallelConfig",
    "ReplicaPlan",
    "RuntimeConfig",
    "StageConfig",
    "find_replica",
    "load_stages",
    "plan_replicas",
]

logger = logging.getLogger(__name__)

_REPLICA: Final = "replica"


def load_stages(path: str | Path, model: str | None = None) -> tuple[StageConfig, ...]:
    """Read the stages of the file, in its order.

    Args:
        path: The stage file.
        model: Folder or hub id to serve in place of the only stage's `engine_args.model`.

    Raises:
        ConfigurationError: The file is refused. Its `details` name every wrong field by its path,
            such as `stages[0].runtime.devices`.
    """
    path = Path(path)
    document = read_mapping(path)
    if model is not None:
        document = _with_model(document, model, path)
    try:
        stages: tuple[StageConfig, ...] = StageFileSchema().load(document)
    except ValidationError as refused:
        details = field_errors(refused, document)
        raise ConfigurationError.from_details(details, f"{path} is refused") from None
    for key in _ignored(document):
        logger.warning("%s: %s is known and has no effect in this service", path, key)
    return stages


def plan_replicas(stages: Sequence[StageConfig], offset: int = 0) -> tuple[ReplicaPlan, ...]:
    """Name the replicas and deal out the devices.

    Numbers run on over the stages: with two replicas in the first stage, the first replica of the
    second is replica2. Each replica takes the next `devices_per_replica` devices of its stage.

    Args:
        stages: What `load_stages` returned.
        offset: Number of the first replica, above 0 on a second host.
    """
    numbers = count(offset)
    return tuple(
        ReplicaPlan(name=f"{_REPLICA}{index}", index=index, stage=stage, devices=chunk)
        for stage in stages
        for chunk, index in zip(stage.chunks, numbers, strict=False)
    )


def find_replica(plans: Sequence[ReplicaPlan], name: str) -> ReplicaPlan:
    """Return the plan of the replica with this name.

    Raises:
        ConfigurationError: No planned replica has the name.
    """
    for plan in plans:
        if plan.name == name:
            return plan
    known = ", ".join(plan.name for plan in plans)
    raise ConfigurationError(
        f"{name!r} is not a replica of this host's stage file, which plans {known}; name one of "
        "these, or set REPLICA_OFFSET to the number of this host's first replica"
    )


def _with_model(document: Mapping[Any, Any], model: str, path: Path) -> dict[Any, Any]:
    """Return the document with the only stage's model replaced; a malformed one as it is."""
    entries = document.get("stages")
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        return dict(document)
    if len(entries) > 1:
        raise ConfigurationError(
            f"the model {model!r} was given beside {path}, which has {len(entries)} stages, so "
            "that it is not clear which one it is for; leave it out and write it into the file"
        )
    return {**document, "stages": [_stage_with_model(entry, model) for entry in entries]}


def _stage_with_model(stage: Mapping[Any, Any], model: str) -> dict[Any, Any]:
    engine_args = stage.get("engine_args")
    if engine_args is None:
        engine_args = {}
    if not isinstance(engine_args, Mapping):
        return dict(stage)
    if engine_args.get("model") == model:
        return dict(stage)
    # A name and defaults that were written for another model are not this one's.
    kept = {key: value for key, value in engine_args.items() if key != "served_model_name"}
    rest = {key: value for key, value in stage.items() if key != "default_sampling_params"}
    return {**rest, "engine_args": {**kept, "model": model}}


def _ignored(document: Mapping[Any, Any]) -> Iterator[str]:
    """Paths of the keys that the schemas accept without using them; the document is a right one."""
    for index, stage in enumerate(document["stages"]):
        sections = (
            ("", stage, StageSchema),
            (".runtime", stage.get("runtime"), RuntimeSchema),
            (".engine_args", stage.get("engine_args"), EngineArgsSchema),
        )
        for name, section, schema in sections:
            for key in section or ():
                if key in schema.ignored:
                    yield f"stages[{index}]{name}.{key}"
