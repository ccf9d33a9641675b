"""The table of parameters: what is made of it has each of them, as the table says."""

from __future__ import annotations

from typing import Any

import pytest
from marshmallow import ValidationError

from api.models.views import LimitsSchema, TakesSchema
from api.requests.answers import ParametersSchema
from api.requests.schema import BODY, EDIT, editable_in
from configs.fields import Editable, Parameter
from configs.parameters import ARGUMENTS, PARAMETERS, Abilities, Parameters
from configs.settings import Settings
from configs.stage_schema import SamplingParamsSchema

TABLE = list(PARAMETERS.values())
NUMBERS = [each for each in TABLE if each.type in {int, float}]
SAMPLING = SamplingParamsSchema()


def by_name(parameter: Parameter) -> str:
    return parameter.name


def test_bodies_edits_and_answers_have_every_parameter_and_its_sentence() -> None:
    answers = ParametersSchema().fields
    assert set(answers) == set(PARAMETERS)
    for name, parameter in PARAMETERS.items():
        assert BODY.fields[name].metadata["description"] == parameter.about
        assert name in EDIT.fields
        assert bool(answers[name].allow_none) is parameter.nullable, name


@pytest.mark.parametrize("parameter", NUMBERS, ids=by_name)
def test_a_body_reads_numbers_and_no_text(parameter: Parameter) -> None:
    body: dict[str, Any] = {"prompt": "a", parameter.name: 1}
    assert BODY.load(body)[parameter.name] == 1
    for wrong in ("1", True, [1]):
        with pytest.raises(ValidationError) as refused:
            BODY.load({**body, parameter.name: wrong})
        assert list(refused.value.messages_dict) == [parameter.name]


@pytest.mark.parametrize("parameter", TABLE, ids=by_name)
def test_a_stage_file_may_set_the_defaults_that_the_table_allows(parameter: Parameter) -> None:
    assert (parameter.name in SAMPLING.fields) is parameter.stage_default
    if not parameter.stage_default or parameter.type in {str, tuple, bool}:
        return
    low, high = parameter.stage_bounds or (parameter.low, parameter.high)
    assert low is not None
    assert high is not None
    for right in (int(low), int(high)):
        assert SAMPLING.load({parameter.name: right}) == {parameter.name: right}
    for wrong in (int(low) - 1, int(high) + 1):
        with pytest.raises(ValidationError, match=parameter.unit):
            SAMPLING.load({parameter.name: wrong})


def test_models_say_what_they_support_and_what_is_limited() -> None:
    assert set(TakesSchema().fields) == {one.name for one in TABLE if one.ability or one.tasks}
    limited = {one.name for one in TABLE if one.limit and one.type is int}
    assert limited <= set(LimitsSchema().fields)


def test_the_names_in_the_table_are_those_of_abilities_and_settings() -> None:
    abilities, settings = Abilities.__dataclass_fields__, Settings.__dataclass_fields__
    for parameter in TABLE:
        assert not parameter.ability or parameter.ability in abilities
        assert not parameter.default or parameter.default in abilities
        assert not parameter.limit or parameter.limit in settings
    assert set(ARGUMENTS) <= set(PARAMETERS)


def test_each_field_of_a_request_is_editable_in_one_way() -> None:
    ways = [editable_in(way) for way in Editable]
    assert sorted(name for names in ways for name in names) == sorted(EDIT.fields)
    assert editable_in(Editable.RUNNING) == {
        "guidance_scale",
        "true_cfg_scale",
        "preview",
        "timeout",
    }


def test_parameters_survive_json_and_leave_out_what_a_newer_version_added() -> None:
    asked = Parameters("a", 1, 64, 64, 4, guidance_scale=3.0, image=("id/input-0.png",))
    assert Parameters.from_json({**asked.to_json(), "not_yet_known": 1}) == asked
