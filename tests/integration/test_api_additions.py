"""The spec at /openapi.json differs from the one that clients were written for by additions only.

`openapi_before.json` is that spec without its descriptions, which may change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.integration.api_world import Api, body_of

BEFORE: dict[str, Any] = json.loads(Path(__file__).with_name("openapi_before.json").read_text())
PAGE_SCHEMA = ("components", "schemas", "RequestList", "properties", "has_more")


def losses(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield what `before` promises and `now` does not keep."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name, value in before.items():
            if name not in now:
                yield f"{path}/{name} is gone"
            elif name == "required" and isinstance(value, list):
                if set(value) != set(now[name]):
                    yield f"{path}/required is {now[name]}"
            else:
                yield from losses(value, now[name], f"{path}/{name}")
        if isinstance(now.get("required"), list) and "required" not in before:
            yield f"{path}/required is {now['required']}"
    elif isinstance(before, Sequence) and isinstance(now, Sequence) and not isinstance(before, str):
        yield from _listed(before, now, path)
    elif before != now:
        yield f"{path} is {now!r}"


def _listed(before: Sequence[Any], now: Sequence[Any], path: str) -> Iterator[str]:
    names = {_name(value): value for value in now}
    for value in before:
        name = _name(value)
        if name in names:
            yield from losses(value, names.pop(name), f"{path}/{name}")
        else:
            yield f"{path}/{name} is gone"
    for name, value in names.items():
        if isinstance(value, Mapping) and "in" in value and value.get("required"):
            yield f"{path}/{name} is required"


def _name(value: Any) -> str:
    """What tells one entry of a list from another: a parameter by its name, else all of it."""
    if isinstance(value, Mapping) and "name" in value:
        return f"{value.get('in', '')}:{value['name']}"
    return json.dumps(value, sort_keys=True)


def _without_descriptions(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_descriptions(inner)
            for name, inner in value.items()
            if not (name in {"description", "summary"} and isinstance(inner, str))
        }
    return [_without_descriptions(inner) for inner in value] if isinstance(value, list) else value


def test_nothing_that_clients_know_is_gone_or_changed(api: Api) -> None:
    now = _without_descriptions(body_of(api.get("/openapi.json")))
    assert list(losses(BEFORE, now)) == []


@pytest.mark.parametrize(
    ("path", "value", "loss"),
    [
        (("paths", "/v1/requests", "get"), None, "is gone"),
        ((*PAGE_SCHEMA, "type"), "string", "is 'string'"),
        ((*PAGE_SCHEMA[:-2], "required"), ["has_more"], "required is"),
        (("components", "schemas", "RequestObject", "properties", "status", "enum"), [], "gone"),
        (("paths", "/v1/requests", "get", "parameters"), [], "query:limit is gone"),
    ],
)
def test_a_loss_is_found(path: tuple[str, ...], value: Any, loss: str) -> None:
    now = deepcopy(BEFORE)
    at = now
    for name in path[:-1]:
        at = at[name]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    assert any(loss in found for found in losses(BEFORE, now))


def test_an_addition_is_none() -> None:
    now = deepcopy(BEFORE)
    now["paths"]["/v2"] = {}
    now["components"]["schemas"]["RequestObject"]["properties"]["more"] = {"type": "string"}
    now["components"]["schemas"]["RequestObject"]["properties"]["status"]["enum"].append("new")
    now["paths"]["/v1/requests"]["get"]["parameters"].append({"in": "query", "name": "more"})
    assert list(losses(BEFORE, now)) == []
