"""The calls for replicas: who lives and how busy, out of the rotation and back in.

Does not know what a replica is made of.
"""

from __future__ import annotations

from typing import Any

from flask_smorest import Blueprint

from api.objects import ReplicaListSchema, ReplicaObjectSchema
from api.presentation import list_object, replica_object
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
    return replica_object(current_service().router.replica(name))


@blueprint.route("/v1/replicas/<name>/drain", methods=["POST"])
@blueprint.response(200, ReplicaObjectSchema)
def drain(name: str) -> dict[str, Any]:
    """Take a replica out of the rotation; what runs there ends there, what waits moves on."""
    return replica_object(current_service().router.drain(name))


@blueprint.route("/v1/replicas/<name>/resume", methods=["POST"])
@blueprint.response(200, ReplicaObjectSchema)
def resume(name: str) -> dict[str, Any]:
    """Let a replica back into the rotation."""
    return replica_object(current_service().router.resume(name))
