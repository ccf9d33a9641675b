"""Models one by one, and by other names than the one that is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from configs.settings import Settings
from routing.replica import LoadedModel
from tests.integration.api_world import ABILITIES, Api, body_of, error_of, wrong_fields
from tests.integration.conftest import ApiOpener

ALIAS, FAR_ALIAS = "gpt-image-1", "dall-e-3"


@pytest.fixture
def named(api_settings: Settings, open_api: ApiOpener, tmp_path: Path) -> Api:
    """An API whose only stage has two names; another host has a model with two names too."""
    file = tmp_path / "named.yaml"
    text = api_settings.stage_configs_path.read_text()
    file.write_text(text.replace("served_model_name: tiny", f"served_model_name: [tiny, {ALIAS}]"))
    api = open_api(replace(api_settings, stage_configs_path=file))
    api.replica().load()
    registry = api.service.registry
    registry.publish_model(LoadedModel("org/far", 3, ABILITIES, (FAR_ALIAS, "tiny")))
    api.replica("replica1").beat(stage=3, model="org/far")
    return api


def test_one_model_by_each_of_its_names(named: Api) -> None:
    listed = {each["id"]: each for each in body_of(named.get("/v1/models"))["data"]}
    assert listed.keys() == {"tiny", "org/far"}
    assert listed["org/far"]["aliases"] == [FAR_ALIAS, "tiny"]
    for name, shown in (
        ("tiny", "tiny"),  # a name goes before another's alias
        (ALIAS, "tiny"),
        ("org/far", "org/far"),
        (FAR_ALIAS, "org/far"),
    ):
        assert body_of(named.get(f"/v1/models/{name}")) == listed[shown]
    answer = named.get("/v1/models/org/other")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")


def test_a_request_by_an_alias_is_one_by_the_name(named: Api) -> None:
    mine, far = named.submitted(model=ALIAS), named.submitted(model=FAR_ALIAS)
    assert (mine["model"], far["model"]) == ("tiny", "org/far")
    for name, expected in ((ALIAS, mine), ("tiny", mine), (FAR_ALIAS, far)):
        (found,) = body_of(named.get(f"/v1/requests?model={name}"))["data"]
        assert found["id"] == expected["id"]
    assert set(wrong_fields(named.submit(model="gpt-image-2"))) == {"model"}
