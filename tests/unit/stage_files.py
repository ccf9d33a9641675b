"""Stage files as tests write them: a right one, and changes to it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.errors import ConfigurationError
from configs.stage_config import StageConfig
from configs.stages import load_stages

REPOSITORY = Path(__file__).resolve().parents[2]

RIGHT: dict[str, Any] = {
    "stages": [
        {
            "stage_id": 0,
            "stage_type": "diffusion",
            "runtime": {"devices": "0,1", "num_replicas": 2},
            "engine_args": {"model": "org/model", "parallel_config": {"world_size": 1}},
        }
    ]
}


def stage(model: str = "org/model", stage_id: int = 0, **sections: Any) -> dict[str, Any]:
    """One entry of `stages`; what `sections` names is laid over engine_args and runtime."""
    runtime = sections.pop("runtime", {})
    engine_args = {"model": model, **sections.pop("engine_args", {})}
    entry = {"stage_id": stage_id, "stage_type": "diffusion", "engine_args": engine_args}
    return {**entry, "runtime": runtime, **sections}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The right file with one value of its only stage replaced; path such as `runtime.devices`."""
    document = copy.deepcopy(RIGHT)
    *sections, key = path.split(".")
    target = document["stages"][0]
    for section in sections:
        target = target.setdefault(section, {})
    target[key] = value
    return document


def load(folder: Path, document: Any, model: str | None = None) -> tuple[StageConfig, ...]:
    """Write the document as YAML (text goes as it is) and load it."""
    file = folder / "stages.yaml"
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return load_stages(file, model)


def refusal(folder: Path, document: Any, model: str | None = None) -> ConfigurationError:
    """The error with which the document is refused."""
    with pytest.raises(ConfigurationError) as refused:
        load(folder, document, model)
    return refused.value


def sole(error: ConfigurationError) -> tuple[str, str]:
    """Path and message of the only thing that is wrong."""
    assert len(error.details) == 1, error.message
    detail = error.details[0]
    assert error.param == detail.param
    assert f"{detail.param}: {detail.message}" in error.message
    return detail.param, detail.message
