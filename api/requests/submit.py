"""A submit or an edit: from a body to what the router takes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from marshmallow import ValidationError

from api.http.body import fingerprint
from api.models.catalog import Catalog, ServedModel
from api.requests.checks import (
    ParameterChecks,
    complete,
    refuse_by_state,
    seconds_faults,
    webhook_faults,
    webhook_of,
)
from api.requests.inputs import InputFiles
from api.requests.schema import RequestBodySchema, RequestEditSchema
from api.service import Service
from configs.errors import (
    FieldError,
    InvalidRequest,
)
from configs.fields import field_errors
from configs.parameters import Parameters
from configs.settings import Settings
from routing.request import Accepted, Priority, Request, Submission, Webhook

_HEADING: Final = "The request is refused"


_INPUTS: Final = frozenset({"image", "mask_image"})


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A right body of a new request.

    `inputs` are those its parameters name; `given` are all fields, those of a dialect too.
    """

    model: ServedModel
    parameters: Parameters
    priority: Priority
    expires_in: float | None
    timeout: float | None
    metadata: Mapping[str, str]
    webhook: Webhook | None
    inputs: InputFiles
    affinity_key: str
    given: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Edit:
    """What a request is to be after an edit; `expires_in` is None where it stays as it is.

    `inputs` are the new ones that its parameters name.
    """

    parameters: Parameters
    priority: Priority
    timeout: float | None
    expires_in: float | None
    inputs: InputFiles


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads bodies against the models that are served now."""

    catalog: Catalog
    settings: Settings

    def new(
        self,
        body: Mapping[str, Any],
        request_id: str,
        schema: RequestBodySchema | None = None,
    ) -> NewRequest:
        """Read the body of a new request, which is to have that id.

        Another `schema` reads another dialect; what it has beyond a request is handed back.

        Raises:
            InvalidRequest: One or more fields are wrong; all are named.
            NoReadyReplica: No replica has loaded the model yet.
        """
        schema = schema or RequestBodySchema()
        try:
            return self._new(body, request_id, schema)
        except InvalidRequest as refused:
            raise _refusal(_in_words_of(schema, body, refused.details)) from None

    def _new(
        self, body: Mapping[str, Any], request_id: str, schema: RequestBodySchema
    ) -> NewRequest:
        given, details = _shaped(body, schema)
        details += seconds_faults(given)
        details += webhook_faults(given, self.settings)
        try:
            model = self.catalog.find(given.get("model"))
        except InvalidRequest as unknown:
            wrong_already = any(detail.param == "model" for detail in details)
            raise _refusal([*details, *(() if wrong_already else unknown.details)]) from None
        details += schema.adapt(given, model)
        inputs, wrong = InputFiles.read(given, request_id, self.settings.max_input_pixels)
        details += wrong
        values = complete({**_parameters_of(given), **inputs.names}, model, self.settings)
        self._check(values, model, details)
        return NewRequest(
            model=model,
            parameters=Parameters.from_json(values),
            priority=Priority(given.get("priority", Priority.NORMAL)),
            expires_in=given.get("expires_in"),
            timeout=given.get("timeout"),
            metadata=given.get("metadata", {}),
            webhook=webhook_of(given.get("webhook")),
            inputs=inputs,
            affinity_key=given.get("affinity_key", ""),
            given=given,
        )

    def edit(self, body: Mapping[str, Any], request: Request) -> Edit:
        """Read the body of an edit of `request`, which it is laid over; null puts a default back.

        Raises:
            InvalidRequest: One or more fields are wrong; all are named.
            NotEditable: The request has ended, or a field never changes.
            NotEditableWhileRunning: The engine cannot change a field between two steps.
        """
        given, details = _shaped(body, RequestEditSchema())
        details += seconds_faults(given)
        if "expires_in" in body and body["expires_in"] is None:
            details.append(FieldError("expires_in", "cannot be taken back; give a longer time"))
        inputs, wrong = InputFiles.read(given, request.id, self.settings.max_input_pixels)
        details += wrong
        if details:
            raise _refusal(details)
        refuse_by_state(body, request)
        model = self.catalog.find(request.model)
        current = request.parameters.to_json()
        kept = {
            name: value
            for name, value in current.items()
            if value is not None and (name not in body or body[name] is not None)
        }
        if not _INPUTS.isdisjoint(body):
            # The task follows the inputs again, unless the edit names one.
            kept.pop("task", None)
        given_now = {**_parameters_of(given), **inputs.names}
        values = complete({**kept, **given_now}, model, self.settings)
        self._check(values, model, details)
        priority = given.get("priority", request.priority if "priority" not in body else "normal")
        return Edit(
            parameters=Parameters.from_json(values),
            priority=Priority(priority),
            timeout=given.get("timeout", request.timeout if "timeout" not in body else None),
            expires_in=given.get("expires_in"),
            inputs=inputs,
        )

    def _check(
        self, values: Mapping[str, Any], model: ServedModel, details: list[FieldError]
    ) -> None:
        skip = frozenset(detail.param.partition("[")[0] for detail in details)
        if not skip.isdisjoint(_INPUTS):
            # What the others mean cannot be told without the one that is wrong.
            skip |= _INPUTS
        details = [*details, *ParameterChecks(values, model, self.settings, skip).errors()]
        if details:
            raise _refusal(details)


def _shaped(
    body: Mapping[str, Any], schema: RequestBodySchema
) -> tuple[dict[str, Any], list[FieldError]]:
    """Return the fields of the right type, size taken apart, and what is wrong with the others."""
    try:
        given: dict[str, Any] = schema.load(body)
        details: list[FieldError] = []
    except ValidationError as refused:
        given = dict(refused.valid_data or {})
        details = field_errors(refused, body)
    size = given.pop("size", None)
    if size is not None:
        if body.get("width") is not None or body.get("height") is not None:
            details.append(
                FieldError("size", "stands beside width or height; give one or the other")
            )
        else:
            given["width"], given["height"] = size
    return given, details


def _parameters_of(given: Mapping[str, Any]) -> dict[str, Any]:
    names = Parameters.__dataclass_fields__
    return {name: value for name, value in given.items() if name in names and name not in _INPUTS}


def _in_words_of(
    schema: RequestBodySchema, body: Mapping[str, Any], details: Sequence[FieldError]
) -> list[FieldError]:
    """Name the fields as the client did: a schema may know a parameter by another name."""
    aliases = {native: alias for alias, native in schema.aliases.items() if alias in body}
    names = {**schema.words, **aliases}
    own = {detail.param.partition("[")[0] for detail in details}
    found = []
    for detail in details:
        base, bracket, rest = detail.param.partition("[")
        # What is wrong under the client's name is not wrong once more under ours.
        if schema.words.get(base) not in own:
            found.append(replace(detail, param=names.get(base, base) + bracket + rest))
    return found


def _refusal(details: Sequence[FieldError]) -> InvalidRequest:
    return InvalidRequest.from_details(details, _HEADING)


def new_request_id() -> str:
    """Return an id that no request has."""
    return f"req_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a submit.

    Attributes:
        accepted: The record and whether it is new, as the router answered.
        given: All fields of the body, those too that only the call itself reads.
    """

    accepted: Accepted
    given: Mapping[str, Any]


def submit_body(
    service: Service,
    body: Mapping[str, Any],
    *,
    key: str = "",
    schema: RequestBodySchema | None = None,
    request_id: str | None = None,
) -> Submitted:
    """Submit what a body asks for.

    Args:
        service: Where to.
        body: The fields, as `schema` has them.
        key: The client's own name for the submit: the same one with the same body is one request.
        schema: The dialect of the body; None for a native one.
        request_id: Id that a new request is to have; None for any.

    Raises:
        ServingError: As :meth:`BodyReader.new` and :meth:`Router.submit`; nothing is recorded.
    """
    request_id = request_id or new_request_id()
    new = BodyReader(service.catalog, service.settings).new(body, request_id, schema)
    aliases = schema.aliases if schema else {}
    native = {aliases.get(name, name): value for name, value in body.items()}
    submission = Submission(
        id=request_id,
        stage=new.model.stage,
        model=new.model.name,
        parameters=new.parameters,
        priority=new.priority,
        expires_in=new.expires_in,
        timeout=new.timeout,
        metadata=new.metadata,
        affinity_key=new.affinity_key,
        webhook=new.webhook,
        idempotency_key=key,
        fingerprint=fingerprint({**native, **new.inputs.digests}),
    )
    accepted = service.router.submit(submission, new.inputs.files)
    return Submitted(accepted, new.given)
