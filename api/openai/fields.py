"""Bodies in OpenAI's words: what all of them share, on top of a native request.

A field may stand at the top or in an object `extra_body`, never in both. What OpenAI's clients send
and has no meaning here is accepted and named in the answer's `warnings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

from marshmallow import ValidationError, fields

from api.http.body import read_body
from api.http.fields import MAX_NAME, SizeField, described
from api.models.catalog import Catalog, ServedModel
from api.openai.tolerance import KNOWN, IgnoredField, tolerate
from api.requests.checks import picked_task
from api.requests.schema import RequestBodySchema
from configs.errors import FieldError, InvalidRequest, MalformedRequest
from configs.fields import Flag, OneOf, Text, Whole
from configs.parameters import OUTPUT_FORMATS
from configs.settings import Settings

_EXTRA: Final = "extra_body"
_ANY_MODEL: Final = "default"
_EMPTY_MEANS_NONE: Final = frozenset({"model", "size"})


class AutoSizeField(SizeField):
    """`"64x48"`, or `auto` for the default."""

    def _deserialize(self, value: Any, *rest: Any, **options: Any) -> Any:
        return None if value == "auto" else super()._deserialize(value, *rest, **options)


class FormatField(OneOf):
    """A file format; `jpg` is `jpeg`."""

    def _deserialize(self, value: Any, *rest: Any, **options: Any) -> Any:
        found = super()._deserialize(value, *rest, **options)
        return "jpeg" if found == "jpg" else found


class NoStreamField(Flag):
    """false only: what this call makes does not come in pieces of text."""

    def _deserialize(self, value: Any, *rest: Any, **options: Any) -> bool:
        if super()._deserialize(value, *rest, **options):
            raise ValidationError(
                "is not available; leave it out, or follow /v1/requests/{id}/events instead"
            )
        return False


class OpenAISchema(RequestBodySchema):
    """A native request with the names that OpenAI's clients use."""

    class Meta(RequestBodySchema.Meta):
        """What others know and no request has."""

        include: ClassVar[Mapping[str, fields.Field[Any]]] = KNOWN

    aliases: ClassVar[Mapping[str, str]] = {"n": "num_outputs_per_prompt"}
    tasks: ClassVar[frozenset[str]]
    product: ClassVar[str]

    model = Text(
        metadata=described("Which model; may be left out, or `default`, where there is only one.")
    )
    n = Whole(metadata=described("How many outputs.", minimum=1))
    size = AutoSizeField(
        metadata=described("Width x height in pixels, or `auto`.", example="64x64")
    )
    output_format = FormatField(*OUTPUT_FORMATS, "jpg", metadata=described("File format."))
    stream: Flag = NoStreamField(metadata=described("Only false."))
    user = fields.Raw(metadata=described("Whose request it is, as `client` of a native one."))

    def adapt(self, given: dict[str, Any], model: ServedModel) -> list[FieldError]:
        """Keep the task among those that make what the call answers with."""
        if user := given.pop("user", None):
            given.setdefault("client", str(user)[:MAX_NAME])
        for alias, native in self.aliases.items():
            if alias in given:
                given[native] = given.pop(alias)
        served = tuple(task for task in model.abilities.tasks if task in self.tasks)
        if not served:
            names = ", ".join(model.abilities.tasks)
            reason = f"{model.name!r} makes no {self.product}; its tasks are {names}"
            return [FieldError("model", reason)]
        task = given.get("task")
        if task is None:
            given["task"] = picked_task(given, replace(model.abilities, tasks=served))
        elif task in model.abilities.tasks and task not in served:
            return [FieldError("task", f"{task} makes no {self.product}")]
        return []

    def tolerate(self, given: dict[str, Any], model: ServedModel, settings: Settings) -> list[str]:
        """Accept what cannot do harm; return one sentence for each such field."""
        said = [
            field.sentence(name, given[name], model.abilities)
            for name, field in self.fields.items()
            if isinstance(field, IgnoredField) and name in given
        ]
        if given.get("task") in model.abilities.tasks:
            said += tolerate(given, model, settings)
        return [sentence for sentence in said if sentence]

    def ignored(self, given: Mapping[str, Any]) -> list[str]:
        """Return one sentence for each field of the call itself that had no meaning."""
        return []


def read_openai_body(schema: OpenAISchema, catalog: Catalog) -> dict[str, Any]:
    """Return the body of the call at hand, with what stood in `extra_body` beside the rest.

    Raises:
        MalformedRequest: It cannot be read, or a field is given twice.
        InvalidRequest: `extra_body` is no object.
    """
    body = joined(read_body(schema))
    for alias, native in schema.aliases.items():
        if alias in body and native in body:
            raise _twice(alias, native)
    if body.get("model") == _ANY_MODEL and catalog.named(_ANY_MODEL) is None:
        del body["model"]
    return body


def joined(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields at the top and those in `extra_body` as one, without those not given.

    Null counts as not given, and as a model or a size empty text does too.

    Raises:
        MalformedRequest: A field stands in both.
        InvalidRequest: `extra_body` is no object.
    """
    found = {name: value for name, value in body.items() if _is_given(name, value)}
    extra = found.pop(_EXTRA, {})
    if not isinstance(extra, dict):
        raise InvalidRequest.from_details([FieldError(_EXTRA, "is not an object")])
    for name, value in extra.items():
        if not _is_given(name, value):
            continue
        if name in found:
            raise _twice(name, f"{_EXTRA}.{name}")
        found[name] = value
    return found


def _is_given(name: str, value: Any) -> bool:
    return value is not None and not (value == "" and name in _EMPTY_MEANS_NONE)


def _twice(name: str, other: str) -> MalformedRequest:
    return MalformedRequest(
        f"{name[:80]!r} is given more than once, as {name[:80]} and as {other[:80]}; give it once.",
        param=name[:80],
    )
