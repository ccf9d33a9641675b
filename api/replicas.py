"""The calls for replicas: list them, look at one, drain, restart and resume it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from flask import g
from flask_smorest import Blueprint
from marshmallow import Schema, fields

from api.http.fields import (
    AnswerSchema,
    ListSchema,
    Page,
    SecondsField,
    always,
    described,
    nested,
    number,
    one_of,
    text,
    whole,
)
from api.service import Service
from configs.fields import Number
from routing.replica import Replica, ReplicaState


class DrainQuerySchema(Schema):
    """The query of the calls that drain a replica."""

    drain_s = Number(
        0,
        86_400,
        "seconds",
        strict=False,
        metadata=described(
            "Seconds that what runs there may go on before it is handed back, at a step boundary, "
            "to another replica. By default the setting DRAIN_S."
        ),
    )


class ReplicaObjectSchema(AnswerSchema):
    """A replica: one process with its own model and devices."""

    name = text("Its name, and that of its queue.")
    object = always("replica")
    state = one_of(ReplicaState, "Only `ready` ones are in the rotation.")
    model = text("The model it serves.", attrgetter("heartbeat.model"))
    stage = whole("Its stage.", attrgetter("heartbeat.stage"))
    host = text("Where it runs.", attrgetter("heartbeat.host"))
    pid = whole("Its process.", attrgetter("heartbeat.pid"))
    devices = fields.List(
        fields.Integer(),
        attribute=attrgetter("heartbeat.devices"),  # type: ignore[arg-type]
        metadata=described("Its device chunk."),
    )
    device_kind = text("`cuda` or `cpu`.", attrgetter("heartbeat.device_kind"))
    capacity = whole("Requests that may share a step.", attrgetter("heartbeat.capacity"))
    running = whole("Requests it has claimed.")
    waiting = whole("Requests in its queue.")
    seconds_per_step = number(
        "Moving mean; null before the first step.", attrgetter("heartbeat.step_s"), allow_none=True
    )
    completed = whole("Requests that succeeded there.")
    failed = whole("Requests that failed there.")
    stolen = whole("Requests that it took from the queues of busy replicas.")
    restarts = whole("Processes it has had before this one.")
    started_at = SecondsField("When its process started.", attrgetter("heartbeat.started_at"))
    last_heartbeat_at = SecondsField("When it was last heard of.", attrgetter("heartbeat_at"))
    memory_bytes = whole(
        "Memory of its process.", attrgetter("heartbeat.memory_bytes"), allow_none=True
    )
    device_memory_bytes = whole(
        "Device memory it holds.", attrgetter("heartbeat.device_memory_bytes"), allow_none=True
    )
    activity = text(
        "What it does while it is `loading`, such as `downloading 14.2 of 57.7 GB`.",
        attrgetter("heartbeat.activity"),
        allow_none=True,
    )
    downloaded_bytes = whole(
        "What is there of its model's files, while it downloads or waits for another's download.",
        attrgetter("heartbeat.downloaded_bytes"),
        allow_none=True,
    )
    download_bytes = whole(
        "The size of these files.", attrgetter("heartbeat.download_bytes"), allow_none=True
    )
    error = text(
        "Why it failed, or why its last start did.", attrgetter("heartbeat.error"), allow_none=True
    )


class ReplicaListSchema(ListSchema):
    """Replicas, by number."""

    data = nested(ReplicaObjectSchema, many=True)


blueprint = Blueprint("replicas", __name__, description="The processes that do the work.")


@blueprint.route("/v1/replicas", methods=["GET"])
@blueprint.response(200, ReplicaListSchema)
def replicas() -> Page:
    """List the replicas seen within the last hour, by number."""
    service: Service = g.service
    return Page(service.registry.all())


@blueprint.route("/v1/replicas/<name>", methods=["GET"])
@blueprint.response(200, ReplicaObjectSchema)
def replica(name: str) -> Replica:
    """Return one replica."""
    service: Service = g.service
    return service.registry.find(name)


@blueprint.route("/v1/replicas/<name>/drain", methods=["POST"])
@blueprint.arguments(DrainQuerySchema, location="query", unknown="raise")
@blueprint.response(200, ReplicaObjectSchema)
def drain(query: dict[str, Any], name: str) -> Replica:
    """Take a replica out of the rotation, until it is resumed.

    What waits there moves on at once; what runs there may end there within drain_s, and is then
    handed back for another attempt on another replica.
    """
    service: Service = g.service
    return service.router.drain(name, query.get("drain_s", service.settings.drain_s))


@blueprint.route("/v1/replicas/<name>/restart", methods=["POST"])
@blueprint.arguments(DrainQuerySchema, location="query", unknown="raise")
@blueprint.response(
    202, ReplicaObjectSchema, description="It drains, ends, and is started by its supervisor."
)
def restart(query: dict[str, Any], name: str) -> Replica:
    """Drain a replica and have its process end, to be started again by whoever supervises it.

    The new process joins the rotation by itself, unless the replica is drained.
    """
    service: Service = g.service
    return service.router.restart(name, query.get("drain_s", service.settings.drain_s))


@blueprint.route("/v1/replicas/<name>/resume", methods=["POST"])
@blueprint.response(200, ReplicaObjectSchema)
def resume(name: str) -> Replica:
    """Let a replica back into the rotation."""
    service: Service = g.service
    return service.router.resume(name)
