"""What must never be asked of Celery's thread pool: it does nothing then, or falls."""

from __future__ import annotations

import re

import pytest

from configs.settings import REPOSITORY

CODE = [
    path
    for folder in ("api", "configs", "routing", "scripts", "workers")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"\brevoke\s*\(", "a revoke is lost with its worker, and a running thread goes on"),
        (r"SIGQUIT", "it raises NotImplementedError in the pool, which then waits all the same"),
        (r"task_(soft_)?time_limit", "it is not enforced in threads"),
    ],
)
def test_no_code_asks_for_what_threads_do_not_do(pattern: str, why: str) -> None:
    found = [path.name for path in CODE if re.search(pattern, path.read_text())]
    assert found == [], why
