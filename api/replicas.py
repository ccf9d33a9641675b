"""The calls for replicas: who lives and how busy, out of the rotation and back in.

Does not know what a replica is made of.
"""

from __future__ import annotations

from typing import Any

from flask_smorest import Blueprint

from api.presentation import list_object, replica_object
from api.replica_objects import DrainQuerySchema, ReplicaListSchema, ReplicaObjectSchema
from api.service import current_service

blueprint = Blueprint("replicas", __name__, description="The processes that do the work.")


@blueprint.route("/v1/replicas", methods=["GET"])
@blueprint.response(200, ReplicaListSchema)
def replicas() -> dict[str, Any]:
    """List the replicas seen within the last hour, by number."""
    found = current_service().router.registry.all()
    return list_object([replica_object(replica) for replica in found])


@blueprint.route("/v1/replicas/<name>", methods=["GET"])
@blueprint.response(200, ReplicaObjectSchema)
def replica(name: str) -> dict[str, Any]:
    """Return one replica."""
    return replica_object(current_service().router.rotation.replica(name))


@blueprint.route("/v1/replicas/<name>/drain", methods=["POST"])
@blueprint.arguments(DrainQuerySchema, location="query", unknown="raise")
@blueprint.response(200, ReplicaObjectSchema)
def drain(query: dict[str, Any], name: str) -> dict[str, Any]:
    """Take a replica out of the rotation, until it is resumed.

    What waits there moves on at once; what runs there may end there within drain_s, and is then
    handed back for another attempt on another replica.
    """
    return replica_object(current_service().router.rotation.drain(name, _drain_s(query)))


@blueprint.route("/v1/replicas/<name>/restart", methods=["POST"])
@blueprint.arguments(DrainQuerySchema, location="query", unknown="raise")
@blueprint.response(
    202, ReplicaObjectSchema, description="It drains, ends, and is started by its supervisor."
)
def restart(query: dict[str, Any], name: str) -> dict[str, Any]:
    """Drain a replica and have its process end, to be started again by whoever supervises it.

    The new process joins the rotation by itself, unless the replica is drained.
    """
    return replica_object(current_service().router.rotation.restart(name, _drain_s(query)))


@blueprint.route("/v1/replicas/<name>/resume", methods=["POST"])
@blueprint.response(200, ReplicaObjectSchema)
def resume(name: str) -> dict[str, Any]:
    """Let a replica back into the rotation."""
    return replica_object(current_service().router.rotation.resume(name))


def _drain_s(query: dict[str, Any]) -> float:
    seconds: float = query.get("drain_s", current_service().settings.drain_s)
    return seconds
