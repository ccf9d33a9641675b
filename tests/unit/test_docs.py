"""The documentation names what is there: paths, modules, links, dependencies, keys, defaults."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from marshmallow import validate

from configs.fields import Number, Whole, readers
from configs.settings import REPOSITORY, Settings
from configs.stage_config import EngineArgs, ParallelConfig, PipelineSettings, RuntimeConfig
from configs.stage_schema import SamplingParamsSchema

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
OTHERS = tuple(REPOSITORY / name for name in ("Makefile", "docker-compose.yml", "Dockerfile"))
FOLDERS = "api|configs|docs|models|routing|scripts|tests|workers"
ELSEWHERE = {"tests/pipelines"}  # of diffusers
PATH = re.compile(rf"(?<![\w./*-])(?:{FOLDERS})/[\w./*-]*[\w/*]")
MODULE = re.compile(r"python3? -m ((?:api|scripts|workers|routing|configs)[\w.]*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
REQUIREMENTS = ("requirements.txt", "requirements-bench.txt", "requirements-dev.txt")


def named(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=named)
def test_every_path_and_module_that_is_named_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = {path for path in PATH.findall(text) if not any(REPOSITORY.glob(path))} - ELSEWHERE
    modules = {name for name in MODULE.findall(text) if importlib.util.find_spec(name) is None}
    assert (paths, modules) == (set(), set())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or link.startswith(("mailto:", "data:")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def anchors(page: Path) -> set[str]:
    """The anchors that a forge makes of a page's headings."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_dependency_is_documented() -> None:
    page = (REPOSITORY / "docs" / "dependencies.md").read_text(encoding="utf-8").lower()
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    documented = set(re.findall(r"[\w.-]+", rows))
    lines = chain.from_iterable(
        (REPOSITORY / name).read_text().splitlines() for name in REQUIREMENTS
    )
    required = {found[0].lower() for line in lines if (found := re.match(r"[A-Za-z][\w.-]*", line))}
    assert required - documented == set()


# Defaults that the page says in words.
SAID = {
    "the bundled `configs/tiny_cpu.yaml`": REPOSITORY / "configs" / "tiny_cpu.yaml",
    "`outputs` in `RUN_DIR`": f"file://{REPOSITORY}/.run/outputs",
    "`.run` in the checkout": REPOSITORY / ".run",
    "none: open": "",
    "none: webhooks are refused": "",
    "the product of the degrees": 1,
    "as saved": None,
    "diffusers' own": {},
    "torch's own choice": None,
    "the folder's name, or the hub id": None,
    "the hub's default": None,
}


def table(head: str) -> Iterator[list[str]]:
    """The cells of a table of docs/configuration.md, line by line."""
    lines = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines()
    for line in lines[lines.index(head) + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def same(cell: str, default: object) -> bool:
    """Whether the cell says this default."""
    if cell in SAID:
        return SAID[cell] == default
    word = cell.split(" (")[0].strip("`")
    if default in (None, "", (), {}):
        return word == "none"
    if isinstance(default, bool):
        return word == str(default).lower()
    return word == (f"{default:.15g}" if isinstance(default, int | float) else default)


def defaults(kind: Any) -> dict[str, Any]:
    """The defaults of a dataclass whose fields all have one, or of those that have."""
    found = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def test_every_setting_is_documented_with_its_unit_and_default() -> None:
    rows = {
        cells[0].strip("`"): cells for cells in table("| variable | meaning | unit | default |")
    }
    expected = defaults(Settings)
    assert rows.keys() == {name.upper() for name in expected}
    for name, reader in readers(Settings).items():
        _, _, unit, default = rows[name.upper()]
        assert same(default, expected[name]), name
        if isinstance(reader, Whole | Number):
            assert unit == reader.unit, name


KEY_TABLES = (
    "| key of a stage | meaning | default | refused |",
    "| key | what it does | default | excludes, refused |",
    "| key of `engine_args` | meaning | default | refused |",
)


def test_every_key_of_a_stage_is_documented_with_its_default() -> None:
    rows = {
        name.rpartition(".")[2]: cells[2]
        for head in KEY_TABLES
        for cells in table(head)
        for name in re.findall(r"`([\w.]+)`", cells[0])
    }
    for kind in (EngineArgs, ParallelConfig, PipelineSettings, RuntimeConfig):
        given = defaults(kind)
        for name in get_type_hints(kind):
            if name in {"pipeline", "parallel_config"}:
                continue  # sections of their own
            assert name in rows, name
            assert name not in given or same(rows[name], given[name]), name


def test_every_default_of_a_stage_is_documented_with_its_range() -> None:
    rows = {
        name: cells[2]
        for cells in table("| key of `default_sampling_params` | unit | range |")
        for name in re.findall(r"`(\w+)`", cells[0])
    }
    for name, reader in SamplingParamsSchema().fields.items():
        assert name in rows
        for validator in reader.validators:
            if isinstance(validator, validate.Range):
                assert rows[name] == f"{validator.min} to {validator.max}", name
