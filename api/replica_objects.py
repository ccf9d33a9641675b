"""The schemas of replicas: the query of the calls that drain one, and what they answer.

`api/presentation.py` makes the values.
"""

from __future__ import annotations

from marshmallow import Schema, fields, validate

from api.object_fields import ListSchema, number, one_of, text, whole
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
