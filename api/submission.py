"""A submit: from a body to a request in the line of a replica, with its inputs stored before it.

The one road for every call that makes a request. Does not know how a body was sent, nor who waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from api.input_files import stored
from api.json_body import fingerprint
from api.request_body import BodyReader
from api.service import Service
from routing.request_store import Accepted, Submission


def submit_body(service: Service, body: Mapping[str, Any], key: str = "") -> Accepted:
    """Submit what a body asks for.

    `key` is the client's own name for the submit; the same one with the same body is one request.

    Raises:
        ServingError: As :meth:`BodyReader.new` and :meth:`Router.submit`; nothing is recorded.
    """
    request_id = f"req_{secrets.token_hex(12)}"
    new = BodyReader(service.catalog, service.settings).new(body, request_id)
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
        fingerprint=fingerprint({**body, **new.inputs.digests}),
    )
    outputs = service.router.outputs
    with stored(outputs, new.inputs.files):
        accepted = service.router.submit(submission)
    if not accepted.created and new.inputs.files:
        outputs.remove(request_id)
    return accepted
