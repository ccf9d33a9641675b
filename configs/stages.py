"""Loads a stage file and plans its replicas: which one has which name and which devices."""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import yaml
from marshmallow import ValidationError

from configs.errors import ConfigurationError
from configs.fields import choices, field_errors
from configs.foreign.dialects import Translation, translate
from configs.foreign.overlays import with_base
from configs.stage_config import ReplicaPlan, StageConfig
from configs.stage_schema import StageFileSchema

logger = logging.getLogger(__name__)


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, refusing a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} appears a second time (first in line "
                    f"{seen[key.value].line + 1}); keep one of the two",
                    problem_mark=key.start_mark,
                )
            seen[key.value] = key.start_mark
        return super().construct_mapping(node, deep=deep)


def read_mapping(path: Path) -> dict[Any, Any]:
    """Read the file's only document, which must be a mapping.

    Raises:
        ConfigurationError: The file cannot be read, is not YAML, is empty or is no mapping.
    """
    document = _parse(path, _text(path))
    if document is None:
        raise ConfigurationError(
            f"{path} is empty; it must hold `stages:` with one entry for each model"
        )
    if not isinstance(document, dict):
        raise ConfigurationError(
            f"{path} holds a {type(document).__name__} at its top level, not a mapping; "
            "it must begin with `stages:`"
        )
    return document


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{path.absolute()} cannot be read: {error.strerror}; give the path of a stage file "
            "(STAGE_CONFIGS_PATH, or the launcher's --stage-configs-path)"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not text in UTF-8 (byte {error.start}); save it as UTF-8"
        ) from None


def _parse(path: Path, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader, made stricter
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"{path}{where}: {_problem(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from None


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "this is not YAML"
    if "'\\t'" in problem:
        return f"{problem}; YAML is indented with spaces; replace the tab"
    if isinstance(error, yaml.composer.ComposerError) and "document" in str(error.context):
        return "a second document begins here; put all stages under one `stages:`"
    return problem


_REPLICA: Final = "replica"


def load_stages(path: str | Path, model: str | None = None) -> tuple[StageConfig, ...]:
    """Read the stages of the file, in its order.

    Args:
        path: The stage file, in any of the dialects of `configs/foreign/dialects.py`.
        model: Folder or hub id to serve in place of the only stage's `engine_args.model`.

    Raises:
        ConfigurationError: The file is refused. Its `details` name every wrong field by its path
            as it stands in the file, such as `stages[0].runtime.devices`.
    """
    path = Path(path)
    return _checked(_read(path, model), str(path))


def stages_of(document: Mapping[Any, Any], name: str) -> tuple[StageConfig, ...]:
    """Return the stages of what a stage file could hold; `name` stands for it in messages.

    Raises:
        ConfigurationError: As `load_stages`.
    """
    return _checked(translate(dict(document)), name)


def _checked(file: Translation, name: str) -> tuple[StageConfig, ...]:
    if file.other is not None:
        raise ConfigurationError.from_details([file.other], f"{name} is refused")
    faults = list(file.faults)
    stages: tuple[StageConfig, ...] = ()
    try:
        stages = StageFileSchema().load(file.document)
    except ValidationError as refused:
        faults += map(file.reworded, field_errors(refused, file.document))
    if faults:
        raise ConfigurationError.from_details(faults, f"{name} is refused")
    if file.ignored:
        logger.warning("%s: these keys have no effect here: %s", name, ", ".join(file.ignored))
    return tuple(
        replace(stage, paths=_paths(file, f"stages[{index}]")) for index, stage in enumerate(stages)
    )


def reference_document(path: Path, model: str | None = None) -> dict[Any, Any]:
    """Return a stage file of any dialect in the reference's, with the model put in; not checked.

    Raises:
        ConfigurationError: The file cannot be read, or the model has no stage of its own.
    """
    return _read(path, model).document


def _read(path: Path, model: str | None) -> Translation:
    file = translate(with_base(path, read_mapping))
    if model is not None and file.other is None:
        file.document = _with_model(file.document, model, path)
    return file


def _paths(file: Translation, stage: str) -> dict[str, str]:
    """Where in the file the stage stands, and what `configs/devices.py` may refuse of it."""
    inner = ("runtime.devices", "engine_args.device")
    return {"": file.written(stage), **{path: file.written(f"{stage}.{path}") for path in inner}}


def plan_replicas(stages: Sequence[StageConfig], offset: int = 0) -> tuple[ReplicaPlan, ...]:
    """Name the replicas and give each its devices.

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
    known = choices(plan.name for plan in plans)
    raise ConfigurationError(
        f"{name!r} is not a replica of this host's stage file; use {known}, or set "
        "REPLICA_OFFSET to the number of this host's first replica"
    )


def _with_model(document: Mapping[Any, Any], model: str, path: Path) -> dict[Any, Any]:
    """Return the document with the only stage's model replaced; a malformed one as it is."""
    entries = document.get("stages")
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        return dict(document)
    if len(entries) > 1:
        raise ConfigurationError(
            f"the model {model!r} cannot be given beside {path}, which has {len(entries)} stages; "
            "write it into the file"
        )
    return {**document, "stages": [_stage_with_model(entry, model) for entry in entries]}


def _stage_with_model(stage: Mapping[Any, Any], model: str) -> dict[Any, Any]:
    engine_args = stage.get("engine_args")
    if engine_args is None:
        engine_args = {}
    if not isinstance(engine_args, Mapping):
        return dict(stage)
    if engine_args.get("model") in (None, model):  # what is written there may be anything
        return {**stage, "engine_args": {**engine_args, "model": model}}
    # A name and defaults that were written for another model are not this one's.
    kept = {key: value for key, value in engine_args.items() if key != "served_model_name"}
    rest = {key: value for key, value in stage.items() if key != "default_sampling_params"}
    return {**rest, "engine_args": {**kept, "model": model}}
