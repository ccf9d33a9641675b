"""Files of the stage_args dialect are refused by the paths they have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.unit.dialect_files import STAGE_ARGS
from tests.unit.stage_files import refusal, sole


@pytest.mark.parametrize(
    ("change", "path", "expected"),
    [
        (
            ("engine_args", {}),
            "engine_args.model",
            "write it here, or on the command line (python -m scri",
        ),
        (("engine_args", {"model": "./nope"}), "engine_args.model", "'./nope' is not a folder"),
        (("runtime", {"worker_cls": "a.B"}), "runtime.worker_cls", "names code of vLLM"),
        (
            ("prompt_expand_func", "a.b"),
            "prompt_expand_func",
            "is not supported: code named in a stage file",
        ),
        (("stage_type", None), "stage_type", "is missing; write stage_type: diffusion"),
    ],
)
def test_a_stage_args_file_is_refused_by_the_paths_it_has(
    tmp_path: Path, change: tuple[str, Any], path: str, expected: str
) -> None:
    document = copy.deepcopy(STAGE_ARGS)
    document["stage_args"][0][change[0]] = change[1]
    found, message = sole(refusal(tmp_path, document))
    assert found == f"stage_args[0].{path}"
    assert expected in message


def test_what_feeds_stages_from_each_other_is_refused(tmp_path: Path) -> None:
    document = {**STAGE_ARGS, "runtime": {"enabled": True, "edges": [{"from": 0, "to": 1}]}}
    found, message = sole(refusal(tmp_path, document))
    assert found == "runtime.edges"
    assert "each stage here answers requests on its own" in message


def test_twins_of_a_stage_args_file_are_named_as_it_names_them(tmp_path: Path) -> None:
    document = {"stage_args": STAGE_ARGS["stage_args"] * 2}
    details = {fault.param: fault.message for fault in refusal(tmp_path, document).details}
    assert details["stage_args[1].stage_id"].startswith(
        "0 is already the stage_id of stage_args[0];"
    )
