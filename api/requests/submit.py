"""A submit or an edit: from a body to what the router records."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from marshmallow import ValidationError

from api.http.body import fingerprint
from api.models.catalog import ServedModel
from api.requests.checks import (
    complete,
    count_errors,
    parameter_errors,
    refuse_by_state,
    webhook_errors,
)
from api.requests.inputs import NO_INPUTS, InputFiles
from api.requests.schema import BODY, EDIT, RequestBodySchema, unknown_fields
from api.service import Service
from configs.errors import FieldError, InvalidRequest
from configs.fields import field_errors
from configs.parameters import PARAMETERS, Parameters
from configs.settings import Settings
from routing.request import DEFAULT_PRIORITY, Accepted, Priority, Request, Submission, Webhook

_HEADING: Final = "The request is refused"
_INPUTS: Final = frozenset({"image", "mask_image"})
_NEGATIVE: Final = frozenset({"negative_prompt", "true_cfg_scale"})
# What can be told of these goes by the task, and the task by the inputs.
_BY_TASK: Final = frozenset(name for name, each in PARAMETERS.items() if each.tasks is not None)


def new_request_id() -> str:
    """Return an id that no request has."""
    return f"req_{secrets.token_hex(12)}"


def submit_body(
    service: Service,
    body: Mapping[str, Any],
    *,
    key: str = "",
    schema: RequestBodySchema = BODY,
    request_id: str = "",
) -> tuple[Accepted, Mapping[str, Any]]:
    """Submit what a body asks for; return the record, and all fields that the body gives.

    Args:
        service: Where to.
        body: The fields, as `schema` has them.
        key: The client's own name for the submit: the same one with the same body is one request.
        schema: The dialect of the body; what it has beyond a request is handed back.
        request_id: Id that a new request is to have; empty for any.

    Raises:
        InvalidRequest: One or more fields are wrong; all are named.
        NoReadyReplica: No replica has loaded the model yet.
        ServingError: As :meth:`Router.submit`; nothing is recorded.
    """
    request_id = request_id or new_request_id()
    try:
        new, inputs, given = _read(service, body, request_id, schema)
    except InvalidRequest as refused:
        raise _refusal(_in_words_of(schema, body, refused.details)) from None
    told = body
    if schema.aliases:
        told = {schema.aliases.get(name, name): value for name, value in body.items()}
    submission = replace(
        new, idempotency_key=key, fingerprint=fingerprint({**told, **inputs.digests})
    )
    return service.router.submit(submission, inputs.files), given


def _read(
    service: Service, body: Mapping[str, Any], request_id: str, schema: RequestBodySchema
) -> tuple[Submission, InputFiles, dict[str, Any]]:
    settings, said = service.settings, list[str]()
    given, details = _fields(body, schema)
    if "webhook" in given:
        details += webhook_errors(given["webhook"], settings)
    try:
        model = service.catalog.find(given.get("model"))
    except InvalidRequest as unknown:
        wrong_already = any(detail.param == "model" for detail in details)
        raise _refusal([*details, *(() if wrong_already else unknown.details)]) from None
    if schema is not BODY:
        details = [
            replace(detail, param=schema.aliases.get(detail.param, detail.param))
            for detail in details
        ]
        wrong = _names(details)
        details += [fault for fault in schema.adapt(given, model) if fault.param not in wrong]
        said = schema.tolerate(given, model, settings)
    inputs = NO_INPUTS
    if not _INPUTS.isdisjoint(given):
        inputs = _inputs(given, request_id, model, settings, details)
    parameters = _checked({}, given, inputs, model, settings, details, schema)
    submission = Submission(
        id=request_id,
        stage=model.stage,
        model=model.name,
        parameters=parameters,
        priority=Priority(given.get("priority", DEFAULT_PRIORITY)),
        expires_in=given.get("expires_in"),
        timeout=given.get("timeout"),
        metadata=given.get("metadata", {}),
        webhook=_webhook(given["webhook"]) if given.get("webhook") else None,
        affinity_key=given.get("affinity_key", ""),
        warnings=(*said, *_notices(given, parameters, model)),
        client=given.get("client", ""),
    )
    return submission, inputs, given


def _notices(given: Mapping[str, Any], values: Parameters, model: ServedModel) -> Iterator[str]:
    """Yield one sentence for each field that was given in vain, and for a strength that grew."""
    if values.strength is not None and "strength" not in given:
        yield from _about_strength(values, model)
    if model.abilities.negative_prompt and (given.keys() & _NEGATIVE):
        yield from _about_negative_prompt(given, values, model)
    most = model.abilities.max_prompt_tokens
    for name in ("prompt", "negative_prompt"):
        # Each word is a token at least; how many are cut the replica says.
        words = len((given.get(name) or "").split())
        if most is not None and words > most:
            yield f"{name} has {words} words, and the model reads {most} tokens at most"


def _about_strength(values: Parameters, model: ServedModel) -> Iterator[str]:
    usual, steps, strength = (
        model.abilities.default_strength,
        values.num_inference_steps,
        values.strength,
    )
    if (
        usual is not None
        and strength is not None
        and int(usual * steps) < 1 <= int(strength * steps)
    ):
        yield f"strength was raised from {usual:.3g} to {strength:.3g}, to run one step"


def _about_negative_prompt(
    given: Mapping[str, Any], values: Parameters, model: ServedModel
) -> Iterator[str]:
    name = "true_cfg_scale" if model.abilities.true_cfg_scale else "guidance_scale"
    scale = getattr(values, name)
    if given.get("negative_prompt") and scale is not None and scale <= 1:
        yield f"negative_prompt has no effect, because {name} is {scale:g}; use more than 1"
    asked = given.get("true_cfg_scale")
    true_guidance = model.abilities.true_cfg_scale and asked is not None and asked > 1
    if true_guidance and not values.negative_prompt:
        yield "true_cfg_scale works against an empty negative prompt, because none is given"


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


def read_edit(service: Service, body: Mapping[str, Any], request: Request) -> Edit:
    """Read the body of an edit of `request`, which it is laid over; null puts a default back.

    Raises:
        InvalidRequest: One or more fields are wrong; all are named.
        NotEditable: The request has ended, or a field never changes.
        NotEditableWhileRunning: The engine cannot change a field between two steps.
    """
    given, details = _fields(body, EDIT)
    if "expires_in" in body and body["expires_in"] is None:
        details.append(FieldError("expires_in", "cannot be removed; give a longer time"))
    inputs = NO_INPUTS
    if not _INPUTS.isdisjoint(given):
        model = service.catalog.find(request.model)
        inputs = _inputs(given, request.id, model, service.settings, details)
    if details:
        raise _refusal(details)
    refuse_by_state(body, request)
    kept = {
        name: value
        for name, value in request.parameters.to_json().items()
        if value is not None and (name not in body or body[name] is not None)
    }
    if not _INPUTS.isdisjoint(body):
        # The task follows the inputs again, unless the edit names one.
        kept.pop("task", None)
    model = service.catalog.find(request.model)
    priority = given.get(
        "priority", request.priority if "priority" not in body else DEFAULT_PRIORITY
    )
    return Edit(
        parameters=_checked(kept, given, inputs, model, service.settings, details, EDIT),
        priority=Priority(priority),
        timeout=given.get("timeout", request.timeout if "timeout" not in body else None),
        expires_in=given.get("expires_in"),
        inputs=inputs,
    )


def _fields(
    body: Mapping[str, Any], schema: RequestBodySchema
) -> tuple[dict[str, Any], list[FieldError]]:
    """Return the fields of the right type, size taken apart, and what is wrong with the others."""
    told = {name: value for name, value in body.items() if value is not None}
    details: list[FieldError] = []
    try:
        given: dict[str, Any] = schema.load(told)
    except ValidationError as refused:
        given = dict(refused.valid_data or {})
        details = field_errors(refused, body)
    if not body.keys() <= schema.fields.keys():
        details += [
            FieldError(name, reason, "unknown_key") for name, reason in unknown_fields(body, schema)
        ]
    size = given.pop("size", None)
    if size is not None:
        if "width" in told or "height" in told:
            reason = "cannot be combined with width or height; give one or the other"
            details.append(FieldError("size", reason))
        else:
            given["width"], given["height"] = size
    return given, details


def _inputs(
    given: Mapping[str, Any],
    request_id: str,
    model: ServedModel,
    settings: Settings,
    details: list[FieldError],
) -> InputFiles:
    if too_many := [*count_errors(given, model)]:
        details += too_many
        return NO_INPUTS
    inputs, wrong = InputFiles.read(given, request_id, settings.max_input_pixels)
    details += wrong
    return inputs


def _checked(
    kept: Mapping[str, Any],
    given: Mapping[str, Any],
    inputs: InputFiles,
    model: ServedModel,
    settings: Settings,
    details: list[FieldError],
    schema: RequestBodySchema,
) -> Parameters:
    """Return the complete parameters: those that are `kept`, and those given laid over them.

    Raises:
        InvalidRequest: They are wrong, or `details` say what is wrong already.
    """
    named = dict(kept)
    for name in given:
        if name in PARAMETERS and name not in _INPUTS:
            named[name] = given[name]
    values = complete({**named, **inputs.names}, model, settings)
    errors = parameter_errors(values, model, settings)
    if details:
        skip = _names(details)
        if skip & _INPUTS or skip & {schema.words.get(name) for name in _INPUTS}:
            # What the others mean cannot be told without the one that is wrong.
            skip |= _BY_TASK
        errors = [*details, *(error for error in errors if error.param not in skip)]
    if errors:
        raise _refusal(errors)
    return Parameters.from_json(values)


def _names(details: Sequence[FieldError]) -> set[str]:
    return {detail.param.partition("[")[0] for detail in details}


def _webhook(given: Mapping[str, Any]) -> Webhook:
    return Webhook(given["url"], tuple(given["events"]))


def _in_words_of(
    schema: RequestBodySchema, body: Mapping[str, Any], details: Sequence[FieldError]
) -> list[FieldError]:
    """Name the fields as the client did: a schema may know a parameter by another name."""
    aliases = {native: alias for alias, native in schema.aliases.items() if alias in body}
    names = {**schema.words, **aliases}
    own = _names(details)
    found = []
    for detail in details:
        base, bracket, rest = detail.param.partition("[")
        # What is wrong under the client's name is not wrong once more under ours.
        if schema.words.get(base) not in own:
            found.append(replace(detail, param=names.get(base, base) + bracket + rest))
    return found


def _refusal(details: Sequence[FieldError]) -> InvalidRequest:
    return InvalidRequest.from_details(details, _HEADING)
