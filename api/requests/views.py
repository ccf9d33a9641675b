"""The calls of a request's life: submit, look, wait, list, change, cancel, remove.

From here a request goes on to `routing/router.py`. Does not know how a body is checked
(`api/requests/submit.py`) nor how a record looks in Redis.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import Any, Final

from flask import Response
from flask_smorest import Blueprint
from redis.exceptions import RedisError

from api.http.body import body_content, read_body
from api.http.headers import IDEMPOTENCY_KEY, idempotency_key, preferred_wait
from api.requests.inputs import all_inputs
from api.requests.objects import list_object, request_object, request_url
from api.requests.schema import (
    ListQuerySchema,
    RequestBodySchema,
    RequestEditSchema,
    RequestListSchema,
    RequestObjectSchema,
)
from api.requests.submit import BodyReader, submit_body
from api.requests.waiting import TooManyWaits
from api.service import Service, current_service
from configs.errors import Conflict, NotEditable
from routing.records import CancelAnswer
from routing.request import Request, Status

Answer = tuple[dict[str, Any], int, dict[str, str]]


_EDIT_TRIES: Final = 3


_PREFER: Final = {
    "in": "header",
    "name": "Prefer",
    "schema": {"type": "string", "example": "wait=30"},
    "description": "wait=N holds the answer up to N seconds, until the request has ended.",
}


_KEY: Final = {
    "in": "header",
    "name": IDEMPOTENCY_KEY,
    "schema": {"type": "string", "maxLength": 255},
    "description": "A name of your own: the same one with the same body submits only once.",
}


_APPLIED: Final = {"Preference-Applied": {"schema": {"type": "string"}}}


_SUBMIT_HEADERS: Final = {"Location": {"schema": {"type": "string"}}, **_APPLIED}


blueprint = Blueprint("requests", __name__, description="Submit, follow, change and cancel.")


@blueprint.route("/v1/requests", methods=["POST"])
@blueprint.doc(requestBody=body_content(RequestBodySchema), parameters=[_PREFER, _KEY])
@blueprint.response(
    202, RequestObjectSchema, headers=_SUBMIT_HEADERS, description="Accepted; it waits or runs."
)
@blueprint.alt_response(
    200,
    schema=RequestObjectSchema,
    headers=_SUBMIT_HEADERS,
    description="It ended while the call was held, or this Idempotency-Key was used before.",
    success=True,
)
def submit() -> Answer:
    """Submit a request."""
    service = current_service()
    key, seconds = idempotency_key(), preferred_wait(service.settings.max_wait_s)
    body = read_body(RequestBodySchema())
    accepted = submit_body(service, body, key=key).accepted
    request, created, place, _ = accepted
    headers = {"Location": request_url(request.id)}
    applied: dict[str, str] = {}
    try:
        request, applied = _held(service, request, seconds)
        headers |= applied
    except TooManyWaits:
        # It is accepted: an answer without Preference-Applied says that nobody waited.
        pass
    status = 202 if created and not request.is_terminal else 200
    if applied:
        with suppress(RedisError):  # it is accepted, and that is to be said
            place = service.records.queue_position(request)
    return _placed(service, request, place), status, headers


@blueprint.route("/v1/requests/<request_id>", methods=["GET"])
@blueprint.doc(parameters=[_PREFER])
@blueprint.response(200, RequestObjectSchema, headers=_APPLIED)
def look(request_id: str) -> Answer:
    """Return a request; `Prefer: wait=N` holds the answer until it has ended, or N seconds."""
    service = current_service()
    seconds = preferred_wait(service.settings.max_wait_s)
    request = service.records.get(request_id)
    request, applied = _held(service, request, seconds)
    return _shown(service, request), 200, applied


@blueprint.route("/v1/requests", methods=["GET"])
@blueprint.arguments(ListQuerySchema, location="query", unknown="raise")
@blueprint.response(200, RequestListSchema)
def newest(query: dict[str, Any]) -> dict[str, Any]:
    """List requests, the newest first; `after` is the id of the last one of the page before."""
    service = current_service()
    limit = query["limit"]
    status = query.get("status")
    matching = service.records.newest(
        query.get("after"),
        status=Status(status) if status else None,
        model=query.get("model"),
        at_once=limit + 1,
    )
    found = list(islice(matching, limit + 1))
    page = found[:limit]
    places = service.records.queue_positions(page)
    shown = [_placed(service, request, place) for request, place in zip(page, places, strict=True)]
    return list_object(shown, has_more=len(found) > limit)


@blueprint.route("/v1/requests/<request_id>", methods=["PATCH"])
@blueprint.doc(requestBody=body_content(RequestEditSchema))
@blueprint.response(200, RequestObjectSchema)
def edit(request_id: str) -> dict[str, Any]:
    """Change a request: anything while it waits; guidance, preview and timeout later too."""
    service = current_service()
    body = read_body(RequestEditSchema())
    for tries_left in reversed(range(_EDIT_TRIES)):
        request = service.records.get(request_id)
        try:
            return _shown(service, _edited(service, request, body))
        except NotEditable:
            raise
        except Conflict as conflict:
            # It moved on between reading and writing; what is allowed may have changed with it.
            if type(conflict) is not Conflict or not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


@blueprint.route("/v1/requests/<request_id>/cancel", methods=["POST"])
@blueprint.response(200, RequestObjectSchema, description="It has ended, now or before.")
@blueprint.alt_response(
    202,
    schema=RequestObjectSchema,
    description="It runs; its replica stops it at the next step.",
    success=True,
)
def cancel(request_id: str) -> Answer:
    """Cancel a request, wherever it is."""
    service = current_service()
    request, answer = service.router.cancel(request_id)
    stopping = answer is CancelAnswer.STOPPING and not request.is_terminal
    return _shown(service, request), 202 if stopping else 200, {}


@blueprint.route("/v1/requests/<request_id>", methods=["DELETE"])
@blueprint.response(204, description="Canceled if needed; record and files are gone.")
def remove(request_id: str) -> Response:
    """Remove a request with its outputs, and cancel it first if it has not ended."""
    current_service().router.remove(request_id)
    return Response(status=204)


def _held(service: Service, request: Request, seconds: int) -> tuple[Request, dict[str, str]]:
    """Hold the call up to `seconds`; return the request then, and the header that says so."""
    if not seconds:
        return request, {}
    if not request.is_terminal:
        request = service.held_calls.wait(request, seconds)
    return request, {"Preference-Applied": f"wait={seconds}"}


def _edited(service: Service, request: Request, body: dict[str, Any]) -> Request:
    change = BodyReader(service.catalog, service.settings).edit(body, request)
    if not body:
        return request
    with service.router.stored(request.id, change.inputs.files):
        edited = service.router.update(
            request,
            change.parameters,
            change.priority,
            timeout=change.timeout,
            expires_in=change.expires_in,
        )
    for name in set(all_inputs(request.parameters)) - set(all_inputs(change.parameters)):
        service.outputs.remove_file(name)
    return edited


def _shown(service: Service, request: Request) -> dict[str, Any]:
    return _placed(service, request, service.records.queue_position(request))


def _placed(service: Service, request: Request, place: int | None) -> dict[str, Any]:
    return request_object(request, place, service.settings.retention_s)
