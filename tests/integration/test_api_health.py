"""Is the API up, can it serve, and do the pages come without anything from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from configs.settings import Settings
from routing.replica import ReplicaState
from tests.integration.api_world import Api, PlayedReplica, body_of, error_of
from tests.integration.conftest import ApiOpener


def test_health_asks_nobody(api: Api) -> None:
    answer = api.get("/health")
    assert (answer.status_code, body_of(answer)) == (200, {"status": "ok"})


def test_ready_once_every_stage_has_a_ready_replica(
    api: Api, api_settings: Settings, open_api: ApiOpener, tmp_path: Path
) -> None:
    replica = api.replica().load()
    answer = api.get("/ready")
    assert answer.status_code == 200
    assert body_of(answer) == {
        "status": "ready",
        "stages": [{"stage": 0, "model": "tiny", "ready_replicas": 1}],
    }
    two = tmp_path / "two.yaml"
    first = api_settings.stage_configs_path.read_text()
    second = first.split("stages:\n")[1].replace("stage_id: 0", "stage_id: 1")
    two.write_text(first + second.replace("served_model_name: tiny", "served_model_name: other"))
    other = open_api(replace(api_settings, stage_configs_path=two))
    answer = other.get("/ready")
    assert answer.status_code == 503
    (missing,) = error_of(answer)["details"]
    assert missing["param"] == "stage 1"
    assert "'other'" in missing["message"]
    replica.beat(stage=0)


@pytest.mark.parametrize(
    ("state", "error", "expected"),
    [
        (None, None, "no replica of 'tiny' has been seen"),
        (ReplicaState.LOADING, None, "replica0 is loading"),
        (ReplicaState.DRAINING, None, "replica0 is draining"),
        (
            ReplicaState.FAILED,
            "no unet in the folder",
            "replica0 is failed (no unet in the folder)",
        ),
    ],
)
def test_not_ready_says_what_is_missing_and_why(
    api: Api, state: ReplicaState | None, error: str | None, expected: str
) -> None:
    if state is not None:
        api.replica().beat(state, error=error)
    answer = api.get("/ready")
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "no_ready_replica"
    assert expected in error_of(answer)["message"]
    assert int(answer.headers["Retry-After"]) >= 1


class _Links(HTMLParser):
    """What a page loads or points to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline_scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [value for name in ("src", "href") if (value := values.get(name))]
        self.inline_scripts += tag == "script" and "src" not in values


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_and_all_it_loads_come_from_here(
    api: Api, replica: PlayedReplica, path: str
) -> None:
    answer = api.get(path)
    assert answer.status_code == 200
    assert answer.mimetype == "text/html"
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "http" not in policy
    links = _Links(answer.get_data(as_text=True))
    answer.close()
    assert links.inline_scripts == 0
    for link in links.found:
        if link.startswith("data:"):
            continue
        assert not re.match(r"[a-z]+:|//", link), link
        loaded = api.get("/" + link)
        assert loaded.status_code == 200, link
        loaded.close()


def test_the_page_has_no_other_files(api: Api) -> None:
    for path in ("/page/__init__.py", "/page/index.html", "/docs/../app.py", "/docs/nothing.js"):
        assert api.get(path).status_code == 404


def test_the_api_runs_without_torch() -> None:
    """Asked of a process of its own: other tests may have imported it in this one."""
    code = (
        "import sys, api.app, api.server; "
        "found = {'torch', 'diffusers', 'transformers', 'workers'} & set(sys.modules); "
        "sys.exit(', '.join(found) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
