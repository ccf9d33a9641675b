"""docs/api.md: each of its examples runs as it stands, against a running service.

Those of videos run against a video model with random weights.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.settings import REPOSITORY
from tests.e2e.service import Service

PAGE = REPOSITORY / "docs" / "api.md"
DEFAULT_URL = "http://127.0.0.1:8099"
RUN_S = 120.0
VIDEOS = "/v1/videos"  # the section whose examples need a model that makes them


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The sections of the page that have examples: title, and language and text of each."""
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if blocks:
            yield title, blocks


@pytest.fixture(scope="module")
def tools() -> None:
    """What the examples are written with; without it skip, or fail where CI is set."""
    missing = [name for name in ("bash", "curl", "jq") if shutil.which(name) is None]
    if not missing:
        return
    reason = f"the examples need {', '.join(missing)} on PATH"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("title", "blocks"), [pytest.param(*each, id=each[0]) for each in sections()]
)
def test_the_examples_of_a_section_run_one_after_another(
    request: pytest.FixtureRequest, tmp_path: Path, title: str, blocks: list[tuple[str, str]]
) -> None:
    service = request.getfixturevalue("film" if title == VIDEOS else "service")
    shell = "".join(text for language, text in blocks if language == "bash")
    scripts = [text for language, text in blocks if language == "python"]
    if shell:
        run(service, tmp_path, ["bash", "-euo", "pipefail", "-c"], shell)
    for script in scripts:
        run(service, tmp_path, [sys.executable, "-c"], script)


def run(service: Service, folder: Path, command: list[str], text: str) -> None:
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "API_PORT": str(service.port),
    }
    done = subprocess.run(
        [*command, text.replace(DEFAULT_URL, service.url)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
