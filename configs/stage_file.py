"""Reads a YAML file into plain mappings, lists and scalars, and says where it cannot.

It knows YAML and nothing of stages. Stricter than PyYAML in one point: a key given twice in one
mapping is refused, where PyYAML silently keeps the last.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from configs.errors import ConfigurationError


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, refusing a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} stands here a second time (first in line "
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
        raise ConfigurationError(f"{path} is not YAML that can be read: {error}") from None


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "this is not YAML"
    if "'\\t'" in problem:
        return f"{problem}; YAML is indented with spaces, put spaces in place of the tab"
    if isinstance(error, yaml.composer.ComposerError) and "document" in str(error.context):
        return "a second document begins here; put all stages under one `stages:`"
    return problem
