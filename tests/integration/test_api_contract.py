"""Whatever is sent to any call: no answer of 5xx, and each as the spec at /openapi.json says.

Schemathesis makes the calls from the spec; a played replica takes what is submitted and ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from configs.settings import Settings
from tests.integration.api_world import ABILITIES, Api, PlayedReplica

EXAMPLES = 30
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
NOT_READY = 503  # what /ready answers where a stage has no replica, by the contract


@pytest.fixture
def world(settings: Settings, redis_client: Redis) -> Iterator[Api]:
    """An API with a replica that ends whatever comes, until the test is over."""
    patient = replace(settings, heartbeat_expiry_s=3600.0, max_wait_s=1.0)
    api = Api(patient).start()
    replica = api.replica().load(replace(ABILITIES, preview=True))
    over = threading.Event()
    ending = threading.Thread(target=_end_all, args=(replica, over), daemon=True)
    ending.start()
    yield api
    over.set()
    ending.join(10)
    api.close()


def _end_all(replica: PlayedReplica, over: threading.Event) -> None:
    claims = replica.claims
    while not over.wait(0.01):
        claim = claims.claim(replica.name, replica.incarnation)
        if claim is not None:
            replica.succeed(claim.request)


@pytest.fixture
def schema(world: Api) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_wsgi("/openapi.json", world.app)


def test_every_answer_is_as_the_spec_says(
    world: Api, schema: schemathesis.BaseSchema, subtests: pytest.Subtests
) -> None:
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) == schema.statistic.operations.total
    for operation in operations:
        with subtests.test(msg=operation.label):
            _check(operation, world)


def _check(operation: Any, api: Api) -> None:
    @given(case=operation.as_strategy(), known=st.booleans())
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    def check(case: Any, known: bool) -> None:
        if known and "request_id" in case.path_parameters:
            case.path_parameters["request_id"] = api.submitted()["id"]
        response = case.call()
        if case.path != "/ready" or response.status_code != NOT_READY:
            case.validate_response(response, checks=CHECKS)

    check()
