"""Keys of vLLM-Omni that are not served: each is listed or refused, and documented."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from configs.foreign.keys import BY_PLACE, FOREIGN, ForeignKeys, Place
from tests.unit.dialect_files import DEPLOY, DOCS, SCHEMAS, STAGE_ARGS
from tests.unit.stage_files import load, refusal, sole


@pytest.mark.parametrize("keys", FOREIGN, ids=lambda keys: keys.names[0])
def test_every_foreign_key_is_listed_or_refused_in_every_dialect(
    tmp_path: Path, keys: ForeignKeys, caplog: pytest.LogCaptureFixture
) -> None:
    for name in keys.names:
        for value, path in [(value, name) for value in (*keys.neutral, "never this")]:
            caplog.clear()
            document = with_key(keys.place, name, value)
            if keys.ignores(value):
                load(tmp_path, document)
                assert name in caplog.records[-1].getMessage()
            else:
                found, message = sole(refusal(tmp_path, document))
                assert found.endswith(path)
                assert keys.why in message


def with_key(place: Place, name: str, value: Any) -> dict[str, Any]:
    """A deploy file for keys of the file, else a reference one, with the key in its place."""
    if place == "file":
        return {**DEPLOY, name: value}
    stage: dict[str, Any] = copy.deepcopy(STAGE_ARGS["stage_args"][0])
    section = {"stage": stage, "parallel_config": {}}.get(place) or stage.get(place, {})
    section[name] = value
    if place == "parallel_config":
        stage["engine_args"]["parallel_config"] = section
    return {"stages": [stage]}


def test_a_key_is_served_or_foreign_and_never_both() -> None:
    for place, schema in SCHEMAS.items():
        both = schema().fields.keys() & BY_PLACE[place].keys()  # type: ignore[index]
        assert not both, f"{both} of {place} are served: take them out of the foreign keys"


def test_the_table_of_the_documentation_is_that_of_the_service() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    start = lines.index("| key of vLLM-Omni | where | what becomes of it |") + 2
    end = lines.index("", start)
    assert lines[start:end] == [keys.row for keys in FOREIGN]


def test_every_key_that_is_served_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for schema in SCHEMAS.values():
        for name in schema().fields:
            assert f"{name}`" in text, f"{name} is not in docs/configuration.md"
