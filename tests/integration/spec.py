"""Compares an answer with the OpenAPI spec: as much of it as our spec uses, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


class Spec:
    """The spec that `/openapi.json` answered."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    def answer_schema(self, method: str, path: str, status: int) -> Mapping[str, Any] | None:
        """The schema of an answer; None where it has no JSON body."""
        responses = self.document["paths"][path][method.lower()]["responses"]
        response = self._resolved(responses.get(str(status), responses.get("default")))
        content = response.get("content", {}).get("application/json")
        return content["schema"] if content else None

    def differences(self, value: Any, schema: Mapping[str, Any], at: str = "") -> Iterator[str]:
        """Name each place where `value` is not what the schema says.

        Stricter than OpenAPI in one thing: an object has all the properties that the schema lists,
        except `details` of an error, and no others.
        """
        schema = self._resolved(schema)
        if "anyOf" in schema:
            yield from self._of_any(value, schema["anyOf"], at)
        elif value is None:
            if not schema.get("nullable"):
                yield f"{at} is null"
        elif "type" in schema:
            yield from self._of_type(value, schema, at)

    def _of_any(self, value: Any, options: Sequence[Mapping[str, Any]], at: str) -> Iterator[str]:
        """Differences from the only such thing in our spec: an object, or null."""
        named = [option for option in options if "$ref" in option]
        nullable = any(option.get("nullable") for option in options)
        if value is not None or not nullable:
            yield from self.differences(value, named[0], at)

    def _of_type(self, value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
        kind = schema["type"]
        wanted = _TYPES[kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "boolean"):
            yield f"{at} is {value!r} and not of type {kind}"
        elif value not in schema.get("enum", [value]):
            yield f"{at} is {value!r}, none of {schema['enum']}"
        elif kind == "array":
            for index, item in enumerate(value):
                yield from self.differences(item, schema.get("items", {}), f"{at}[{index}]")
        elif "properties" in schema:
            yield from self._of_properties(value, schema["properties"], at)

    def _of_properties(
        self, value: Mapping[str, Any], properties: Mapping[str, Any], at: str
    ) -> Iterator[str]:
        for name in sorted((set(properties) ^ set(value)) - {"details"}):
            yield f"{at}.{name} is in the {'answer' if name in value else 'spec'} only"
        for name in sorted(set(properties) & set(value)):
            yield from self.differences(value[name], properties[name], f"{at}.{name}")

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            found: Any = self.document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema
