"""The schemas of replicas: the query of the calls that drain one, and what they answer.

`api/requests/objects.py` makes the values.
"""

from __future__ import annotations

from typing import Any

from flask_smorest import Blueprint
from marshmallow import Schema, fields, validate

from api.http.fields import ListSchema, number, one_of, text, whole
from api.requests.objects import list_object, replica_object
from api.service import current_service
from routing.replica import ReplicaState

_LONGEST_DRAIN_S = 86_400


class DrainQuerySchema(Schema):
    """The query of the calls that take a replica out of the rotation."""

    drain_s = fields.Float(
        validate=validate.Range(0, _LONGEST_DRAIN_S, error=f"is not from 0 to {_LONGEST_DRAIN_S}"),
        error_messages={"invalid": "is not a number", "special": "is not a number"},
        metadata={
            "description": "Seconds that what runs there may go on before it is handed back, at a "
            "step boundary, to another replica. By default the setting DRAIN_S."
        },
    )


class ReplicaObjectSchema(Schema):
    """A replica: one process with its own model and devices."""

    name = text("Its name, and that of its queue.")
    object = text("Always `replica`.")
    state = one_of(ReplicaState, "Only `ready` ones are in the rotation.")
    model = text("The model it serves.")
    stage = whole("Its stage.")
    host = text("Where it runs.")
    pid = whole("Its process.")
    devices = fields.List(fields.Integer(), metadata={"description": "Its device chunk."})
    device_kind = text("`cuda` or `cpu`.")
    capacity = whole("Requests that may share a step.")
    running = whole("Requests it has claimed.")
    waiting = whole("Requests in its line.")
    seconds_per_step = number("Moving mean; null before the first step.", allow_none=True)
    completed = whole("Requests that succeeded there.")
    failed = whole("Requests that failed there.")
    restarts = whole("Processes it has had before this one.")
    started_at = number("When its process started.")
    last_heartbeat_at = number("When it was last heard of.")
    memory_bytes = whole("Memory of its process.", allow_none=True)
    device_memory_bytes = whole("Device memory it holds.", allow_none=True)
    error = text("Why it failed, or why its last start did.", allow_none=True)


class ReplicaListSchema(ListSchema):
    """Replicas, by number."""

    data = fields.List(fields.Nested(ReplicaObjectSchema))


blueprint = Blueprint("replicas", __name__, description="The processes that do the work.")


@blueprint.route("/v1/replicas", methods=["GET"])
@blueprint.response(200, ReplicaListSchema)
def replicas() -> dict[str, Any]:
    """List the replicas seen within the last hour, by number."""
    found = current_service().registry.all()
    return list_object([replica_object(replica) for replica in found])


@blueprint.route("/v1/replicas/<name>", methods=["GET"])
@blueprint.response(200, ReplicaObjectSchema)
def replica(name: str) -> dict[str, Any]:
    """Return one replica."""
    return replica_object(current_service().registry.find(name))


@blueprint.route("/v1/replicas/<name>/drain", methods=["POST"])
@blueprint.arguments(DrainQuerySchema, location="query", unknown="raise")
@blueprint.response(200, ReplicaObjectSchema)
def drain(query: dict[str, Any], name: str) -> dict[str, Any]:
    """Take a replica out of the rotation, until it is resumed.

    What waits there moves on at once; what runs there may end there within drain_s, and is then
    handed back for another attempt on another replica.
    """
    return replica_object(current_service().router.drain(name, _drain_s(query)))


@blueprint.route("/v1/replicas/<name>/restart", methods=["POST"])
@blueprint.arguments(DrainQuerySchema, location="query", unknown="raise")
@blueprint.response(
    202, ReplicaObjectSchema, description="It drains, ends, and is started by its supervisor."
)
def restart(query: dict[str, Any], name: str) -> dict[str, Any]:
    """Drain a replica and have its process end, to be started again by whoever supervises it.

    The new process joins the rotation by itself, unless the replica is drained.
    """
    return replica_object(current_service().router.restart(name, _drain_s(query)))


@blueprint.route("/v1/replicas/<name>/resume", methods=["POST"])
@blueprint.response(200, ReplicaObjectSchema)
def resume(name: str) -> dict[str, Any]:
    """Let a replica back into the rotation."""
    return replica_object(current_service().router.resume(name))


def _drain_s(query: dict[str, Any]) -> float:
    seconds: float = query.get("drain_s", current_service().settings.drain_s)
    return seconds
