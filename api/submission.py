"""A submit: from a body to a request in the line of a replica, with its inputs stored before it.

The one road for every call that makes a request. Does not know how a body was sent, nor who waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from api.input_files import stored
from api.json_body import fingerprint
from api.request_body import BodyReader
from api.request_schema import RequestBodySchema
from api.service import Service
from routing.submission import Accepted, Submission


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
    router = service.router
    with stored(router, request_id, new.inputs.files):
        accepted = router.submit(submission)
    if not accepted.created and new.inputs.files:
        router.outputs.remove(request_id)
        router.loose.strike(request_id)
    return Submitted(accepted, new.given)
