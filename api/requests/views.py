"""The calls of a request's life: submit, look, wait, list, change, cancel, remove.

A body is checked in `api/requests/submit.py`; from here a request goes on to `routing/router.py`.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import Any, Final

from flask import Response, g
from flask_smorest import Blueprint
from redis.exceptions import RedisError

from api.http.body import body_content, read_body
from api.http.call import PREFER_PARAMETER, idempotency_key, key_parameter, preferred_wait
from api.http.fields import Page
from api.requests.answers import (
    RequestListSchema,
    RequestObjectSchema,
    ShownRequest,
    request_url,
)
from api.requests.inputs import all_inputs
from api.requests.schema import BODY, EDIT, ListQuerySchema, RequestBodySchema, RequestEditSchema
from api.requests.submit import read_edit, submit_body
from api.requests.waiting import TooManyWaits
from api.service import Service
from configs.errors import Conflict, NotEditable
from routing.records import CancelAnswer
from routing.request import Request, Status

Answer = tuple[ShownRequest, int, dict[str, str]]


_EDIT_TRIES: Final = 3
_APPLIED: Final = {"Preference-Applied": {"schema": {"type": "string"}}}
_SUBMIT_HEADERS: Final = {"Location": {"schema": {"type": "string"}}, **_APPLIED}


blueprint = Blueprint("requests", __name__, description="Submit, follow, change and cancel.")


@blueprint.route("/v1/requests", methods=["POST"])
@blueprint.doc(
    requestBody=body_content(RequestBodySchema), parameters=[PREFER_PARAMETER, key_parameter()]
)
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
    service: Service = g.service
    key, seconds = idempotency_key(), preferred_wait(service.settings.max_wait_s)
    accepted, _ = submit_body(service, read_body(BODY), key=key)
    request, place = accepted.request, accepted.queue_position
    headers = {"Location": request_url(request.id)}
    if seconds:
        try:
            request, applied = _held(service, request, seconds)
            headers |= applied
            with suppress(RedisError):  # it is accepted, and that is to be said
                place = service.records.queue_position(request)
        except TooManyWaits:
            # It is accepted: an answer without Preference-Applied says that nobody waited.
            pass
    status = 202 if accepted.created and not request.is_terminal else 200
    return ShownRequest(request, service.settings.retention_s, place), status, headers


@blueprint.route("/v1/requests/<request_id>", methods=["GET"])
@blueprint.doc(parameters=[PREFER_PARAMETER])
@blueprint.response(200, RequestObjectSchema, headers=_APPLIED)
def look(request_id: str) -> Answer:
    """Return a request; `Prefer: wait=N` holds the answer until it has ended, or N seconds."""
    service: Service = g.service
    seconds = preferred_wait(service.settings.max_wait_s)
    request, applied = service.records.get(request_id), dict[str, str]()
    if seconds:
        request, applied = _held(service, request, seconds)
    return _shown(service, request), 200, applied


@blueprint.route("/v1/requests", methods=["GET"])
@blueprint.arguments(ListQuerySchema, location="query", unknown="raise")
@blueprint.response(200, RequestListSchema)
def newest(query: dict[str, Any]) -> Page:
    """List requests, the newest first; `after` is the id of the last one of the page before."""
    service: Service = g.service
    limit = query["limit"]
    status = query.get("status")
    model = query.get("model")
    matching = service.records.newest(
        query.get("after"),
        status=Status(status) if status else None,
        model=model and service.catalog.shown_name(model),
        at_once=limit + 1,
    )
    found = list(islice(matching, limit + 1))
    page = found[:limit]
    places = service.records.queue_positions(page)
    kept_s = service.settings.retention_s
    shown = [
        ShownRequest(request, kept_s, place) for request, place in zip(page, places, strict=True)
    ]
    return Page(shown, has_more=len(found) > limit)


@blueprint.route("/v1/requests/<request_id>", methods=["PATCH"])
@blueprint.doc(requestBody=body_content(RequestEditSchema))
@blueprint.response(200, RequestObjectSchema)
def edit(request_id: str) -> ShownRequest:
    """Change a request: anything while it waits; guidance, preview and timeout later too."""
    service: Service = g.service
    body = read_body(EDIT)
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
    service: Service = g.service
    request, answer = service.router.cancel(request_id)
    stopping = answer is CancelAnswer.STOPPING and not request.is_terminal
    return _shown(service, request), 202 if stopping else 200, {}


@blueprint.route("/v1/requests/<request_id>", methods=["DELETE"])
@blueprint.response(204, description="Canceled if needed; record and files are gone.")
def remove(request_id: str) -> Response:
    """Remove a request with its outputs, and cancel it first if it has not ended."""
    g.service.router.remove(request_id)
    return Response(status=204)


def _held(service: Service, request: Request, seconds: int) -> tuple[Request, dict[str, str]]:
    """Hold the call up to `seconds`; return the request then, and the header that says so."""
    if not request.is_terminal:
        request = service.held_calls.wait(request, seconds)
    return request, {"Preference-Applied": f"wait={seconds}"}


def _edited(service: Service, request: Request, body: dict[str, Any]) -> Request:
    change = read_edit(service, body, request)
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


def _shown(service: Service, request: Request) -> ShownRequest:
    place = None
    if request.status is Status.QUEUED:
        place = service.records.queue_position(request)
    return ShownRequest(request, service.settings.retention_s, place)
