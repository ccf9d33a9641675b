"""Files that are no stage files: what cannot be read, and YAML that says something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ConfigurationError
from configs.stages import load_stages
from tests.unit.stage_files import load, refusal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", " is empty; it must hold `stages:` with one entry for each model"),
        ("# only a remark\n", " is empty; it must hold `stages:`"),
        ("- 1\n", " holds a list at its top level, not a mapping; it must begin with `stages:`"),
        ("hello", " holds a str at its top level, not a mapping"),
        ("{}", "stages: is missing; write `stages:` with one entry for each model"),
        ("stages:\n", "stages: is missing; write `stages:`"),
        ("stages: []", "stages: [] is empty; write an entry for each model"),
        ("stages: 3", "stages: 3 is not a list; write an entry for each model"),
        ("a: b: c", ", line 1, column 5: mapping values are not allowed here"),
        ("a: [1,\n", ", line 2, column 1: "),
        ("a: 'b\n", ", line 2, column 1: "),
        ("a: 1\n\tb: 2\n", "YAML is indented with spaces; replace the tab"),
        (
            "a: 1\nb:\n  c: 1\n  c: 2\n",
            ", line 4, column 3: the key 'c' appears a second time ",
        ),
        ("a: 1\n---\nb: 2\n", ", line 2, column 1: a second document begins here; put all stages"),
        ("{[1]: 2}", ", line 1, column 2: found unhashable key"),
        ("a: *nothing", ", line 1, column 4: found undefined alias 'nothing'"),
        ("a: !!python/object:os.system x", ", line 1, column 4: could not determine a constructor"),
        ("a: \x07", " is not valid YAML: "),
        ("a: 2020-13-45", " is not valid YAML: "),
        ("[" * 5000, " is not valid YAML: "),
    ],
)
def test_a_file_that_is_no_stage_file(tmp_path: Path, text: str, expected: str) -> None:
    message = str(refusal(tmp_path, text))
    assert message.startswith(f"{tmp_path}/stages.yaml")
    assert expected in message


def test_a_key_given_twice_names_both_lines(tmp_path: Path) -> None:
    text = "stages:\n  - stage_id: 0\n    stage_type: diffusion\n    stage_id: 1\n"
    assert str(refusal(tmp_path, text)) == (
        f"{tmp_path}/stages.yaml, line 4, column 5: the key 'stage_id' appears a second time "
        "(first in line 2); keep one of the two"
    )


def test_a_merge_key_may_be_overridden(tmp_path: Path) -> None:
    text = (
        "stages:\n"
        "  - &first {stage_id: 0, stage_type: diffusion, engine_args: {model: org/a}}\n"
        "  - {<<: *first, stage_id: 1, engine_args: {model: org/b}}\n"
    )
    assert [one.model_name for one in load(tmp_path, text)] == ["org/a", "org/b"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigurationError) as refused:
            load_stages(path)
        assert f"{path} cannot be read: {reason}" in str(refused.value)
        assert "STAGE_CONFIGS_PATH" in str(refused.value)


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigurationError, match="is not text in UTF-8 \\(byte 3\\); save it as"):
        load_stages(tmp_path / "latin.yaml")
