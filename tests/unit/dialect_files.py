"""Stage files of the other dialects, as tests write them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from configs.stage_schema import (
    EngineArgsSchema,
    ParallelConfigSchema,
    RuntimeSchema,
    StageFileSchema,
    StageSchema,
)
from tests.unit.stage_files import REPOSITORY

FILES = Path(__file__).parent / "dialects"


DOCS = REPOSITORY / "docs" / "configuration.md"


SCHEMAS = {
    "file": StageFileSchema,
    "stage": StageSchema,
    "runtime": RuntimeSchema,
    "engine_args": EngineArgsSchema,
    "parallel_config": ParallelConfigSchema,
}


DEPLOY: dict[str, Any] = {
    "pipeline": "qwen_image",
    "stages": [{"stage_id": 0, "model": "org/model", "devices": "0,1", "num_replicas": 2}],
}


STAGE_ARGS: dict[str, Any] = {
    "stage_args": [
        {
            "stage_id": 0,
            "stage_type": "diffusion",
            "runtime": {"devices": "0,1", "num_replicas": 2},
            "engine_args": {"model": "org/model"},
        }
    ]
}


def deploy(**keys: Any) -> dict[str, Any]:
    """A deploy file with these keys in its only stage."""
    document = copy.deepcopy(DEPLOY)
    document["stages"][0].update(keys)
    return document
